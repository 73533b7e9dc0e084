"""Attacks on the weights that a federated client sends back.

In reading order:

- `api`: :func:`leakwatch.attacks.attack_update`, everything in one call; `presets`: the
  published attacks by name.
- `base`: what they have in common; `labels`: classes counted in the update of the last
  layer; `descent`: the images go downhill, and α with them.
- `surrogate`: the update as a gradient between the weights before and after, with
  `match` and `low_rank` for networks of known layers.
- `simulation`: the update as the end of all local steps, with `local_steps` (their
  derivative), `simulation_cost` and `priors`.

A new attack is one file with its class and one line that registers it:

    >>> from dataclasses import dataclass
    >>> import torch
    >>> from leakwatch import WeightUpdate, attack_update
    >>> from leakwatch.attacks import FirstOrder, SearchResult, SharedGradient
    >>> from leakwatch.attacks import UpdateAttack, UpdatePreset, register_update_attack
    >>> from leakwatch.attacks.updates.labels import with_weights
    >>> @dataclass(frozen=True)
    ... class FirstGradient(UpdateAttack):
    ...     '''Takes the update for a gradient at the first weights.'''
    ...
    ...     name: str = "first-gradient"
    ...     steps: int = 100
    ...
    ...     def search(self, task):
    ...         update = task.update
    ...         shared = SharedGradient(
    ...             update.difference, task.labels, update.sample_shape, update.samples)
    ...         result = FirstOrder(distance="cosine", steps=self.steps).run(
    ...             with_weights(task.gradients, update.initial), shared,
    ...             pixels=task.pixels, start=task.start, seed=task.seed,
    ...             restarts=task.restarts, progress=task.progress)
    ...         loss = result.restart_loss
    ...         steps = result.iterations.expand_as(loss)
    ...         return SearchResult(result.restart_images, loss, steps)
    >>> preset = register_update_attack(UpdatePreset(FirstGradient(), source="here"))

Callbacks, command line and configurations find it by its name:

    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(9, 3))
    >>> before = torch.cat([p.detach().flatten() for p in net.parameters()])
    >>> labels = torch.tensor([[0, 2]])  # one client's
    >>> update = WeightUpdate(
    ...     before, before + 0.01 * torch.randn(1, 30), labels, (1, 3, 3), samples=2)
    >>> result = attack_update(net, update, "first-gradient", steps=5, data_range=1.0)
    >>> result.images.shape, result.attack
    (torch.Size([1, 2, 1, 3, 3]), 'first-gradient')
"""
