"""An attack on weight updates in one call."""

from __future__ import annotations

import torch
from torch import nn

from leakwatch.attacks.base import Progress, check_arguments, following
from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.result import UpdateReconstruction
from leakwatch.attacks.start import Start, StartKind
from leakwatch.attacks.updates import presets
from leakwatch.attacks.updates.base import UpdateAttack
from leakwatch.checks import check_function
from leakwatch.derivatives import Criterion, GradientMap, Prepare
from leakwatch.derivatives.parameter_filters import ParameterFilter
from leakwatch.normalization import Channels
from leakwatch.weight_update import WeightUpdate

__all__ = ["attack_update"]


def attack_update(
    module: nn.Module,
    update: WeightUpdate,
    preset: str | UpdateAttack = "sme",
    *,
    start: StartKind | Start | None = None,
    steps: int | None = None,
    restarts: int | None = None,
    mean: Channels | None = None,
    std: Channels | None = None,
    data_range: float | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    criterion: Criterion | None = None,
    prepare: Prepare | None = None,
    parameters: ParameterFilter | None = None,
    time_limit: float | None = None,
    progress: bool | Progress = False,
    **overrides: object,
) -> UpdateReconstruction:
    """Rebuilds clients' samples from the weights that they sent back.

    All clients and restarts are attacked at once, each with its own α, optimiser and
    random stream: what else is attacked beside a client changes nothing for it.

    Args:
        module: the network, whose own weights are not looked at; in evaluation mode,
            whatever mode it is in. ``forward(x)`` gives logits, unless ``criterion``
            says otherwise.
        update: the weights before and after, and what else the server knows. Labels may
            stand in any order; unknown ones are counted in the update of the last
            layer where the local training is known.
        preset: ``"sme"``, ``"ig-update"``, ``"dlfa"``, or an attack object.
        start: ``"normal"``, ``"uniform"``, ``"zeros"``, or a :class:`Start`. Default:
            the preset's.
        steps: evaluations per attack. Default: as published.
        restarts: tries per client. Default: the preset's.
        mean: per channel mean of the normalisation of the network's inputs.
        std: per channel standard deviation of it. With both, images are kept in pixel
            range [0, 1].
        data_range: largest pixel value, the smallest being 0; with it images are kept
            in that range. Without it and without mean and std there is no box.
        seed: of the starts.
        dtype: arithmetic. Weights are differences of close numbers: share them in
            float64 where you can.
        criterion: ``criterion(module, x, y)`` → one loss per sample; clients train on
            the mean over a batch.
        prepare: what became of a batch of inputs before the network got it, a
            differentiable function; the attacker knows it, and looks for samples as
            they went in.
        parameters: which of them are trained and shared, see
            :class:`leakwatch.derivatives.GradientMap`. Default: all that are trained.
        time_limit: seconds for the attack's steps.
        progress: ``True`` for a line on stderr, or a callable, see
            :data:`leakwatch.attacks.base.Progress`.
        overrides: other settings of the preset, such as ``lr``, ``tv``, ``alpha``; see
            :class:`leakwatch.attacks.updates.surrogate.SurrogateAttack` and
            :class:`leakwatch.attacks.updates.simulation.SimulationAttack`.

    Returns:
        The best images of each client, in any order, with α, loss and a status.

    Raises:
        TypeError: if ``update`` is no :class:`leakwatch.weight_update.WeightUpdate`,
            ``prepare`` no function, or numbers are of the wrong kind.
        ValueError: for an unknown preset or setting, an update of another network, or
            labels that are neither known nor can be counted.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(9, 3))
        >>> before = torch.cat([p.detach().flatten() for p in net.parameters()])
        >>> after = before + 0.01 * torch.randn(2, 30)  # of two clients
        >>> labels = torch.tensor([[0, 2], [1, 1]])
        >>> update = WeightUpdate(before, after, labels, (1, 3, 3), samples=2)
        >>> result = attack_update(net, update, "sme", steps=10, data_range=1.0)
        >>> result.images.shape, result.alpha.shape
        (torch.Size([2, 2, 1, 3, 3]), torch.Size([2]))
    """
    if not isinstance(update, WeightUpdate):
        raise TypeError(
            f"update must be a leakwatch.weight_update.WeightUpdate, got a "
            f"{type(update).__name__}; make one of the weights before and after, or "
            f"with leakwatch.federated.client_updates of what clients sent."
        )
    seed = check_arguments(seed, restarts, progress)
    check_function("prepare", prepare, "prepare(x) → network inputs")
    chosen = presets.resolve(preset, steps, overrides)
    begins = chosen.start if start is None else start
    with following(progress, "attack on updates") as told:
        return chosen.attack.run(
            GradientMap(
                module, criterion, prepare=prepare, parameters=parameters, dtype=dtype
            ),
            update,
            pixels=PixelScale.of(mean, std, data_range),
            start=begins if isinstance(begins, Start) else Start(begins),
            seed=seed,
            restarts=chosen.restarts if restarts is None else restarts,
            time_limit=time_limit,
            progress=told,
        )
