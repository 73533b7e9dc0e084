"""Attacks that search the inputs or weights of a generator instead of pixels.

- `gias`: a generator of yours, trained or not; `ci_net`: an untrained one that is wider
  than the attacked network, made by `ci_generator`.
- `search_space`: pixels, latents or weights as what is searched; `search`: Adam on any
  of them; `stacked_modules`: many copies of a generator, each with its own weights.

A new generator is a module, and one line that registers it:

    >>> import torch
    >>> from torch import nn
    >>> from leakwatch.attacks import GIASAttack, Preset, attack, register_attack
    >>> generator = nn.Sequential(  # from latents (8,) to images (1, 3, 3) in (0, 1)
    ...     nn.Linear(8, 9), nn.Sigmoid(), nn.Unflatten(1, (1, 3, 3)))
    >>> preset = register_attack(Preset(
    ...     GIASAttack(generator, (8,), output_range=(0, 1), pretrained=False,
    ...                weight_steps=100, name="tiny-generator"),
    ...     source="this page"))

Callbacks, command line and configurations find it by its name:

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(9, 3))
    >>> x, y = torch.rand(2, 1, 3, 3), torch.tensor([0, 2])
    >>> result = attack(
    ...     net, x, y, "tiny-generator", weight_steps=3, data_range=1.0)
    >>> result.images.shape, result.attack
    (torch.Size([2, 1, 3, 3]), 'tiny-generator')
"""
