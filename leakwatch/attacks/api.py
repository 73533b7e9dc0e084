"""An attack in one call."""

from __future__ import annotations

import time
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from leakwatch.attacks import presets
from leakwatch.attacks.base import Attack, Progress, check_arguments, following
from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.result import Reconstruction
from leakwatch.attacks.shared_gradient import Perturbation, SharedGradient
from leakwatch.attacks.start import Start, StartKind
from leakwatch.checks import check_function, check_integer, check_number
from leakwatch.derivatives import Criterion, GradientMap, Prepare
from leakwatch.derivatives.parameter_filters import ParameterFilter
from leakwatch.normalization import Channels, check_normalization

__all__ = ["attack"]


def attack(
    module: nn.Module,
    x: Float[Tensor, "n ..."],
    y: Shaped[Tensor, "n ..."],
    preset: str | Attack = "inverting-gradients",
    *,
    start: StartKind | Start | None = None,
    radius: float = 0.1,
    steps: int | None = None,
    restarts: int | None = None,
    labels: Literal["known", "inferred"] = "known",
    mean: Channels | None = None,
    std: Channels | None = None,
    data_range: float | None = None,
    noise_std: float = 0.0,
    perturb: Perturbation | None = None,
    images: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    criterion: Criterion | None = None,
    prepare: Prepare | None = None,
    parameters: ParameterFilter | None = None,
    time_limit: float | None = None,
    progress: bool | Progress = False,
    **overrides: object,
) -> Reconstruction:
    """Shares the gradients of these samples, and rebuilds the samples from them.

    Every sample, or every ``images`` successive ones, is one target; all targets and
    restarts are attacked at once.

    Args:
        module: the network, on any device; left as it was. ``forward(x)`` gives logits,
            unless ``criterion`` says otherwise.
        x: true samples, network-input units: they make the gradients, and nothing else
            of them reaches the attack unless ``start`` is ``"near"``.
        y: their class indices, or the targets that ``criterion`` takes: soft labels,
            several labels, numbers, masks. These have to be known. The network is
            attacked in evaluation mode, whatever mode it is in: BatchNorm with its
            running statistics, no dropout.
        preset: a published attack by name (``"dlg"``, ``"idlg"``,
            ``"inverting-gradients"``, ``"gradinversion-bn"``, ``"lavp-l2"``,
            ``"lavp-cosine"``, ``"gauss-newton"``, ``"combined"``, ``"ci-net"``), or an
            attack object.
        start: ``"normal"``, ``"uniform"``, ``"zeros"``, ``"near"``, or a
            :class:`Start`. Default: the preset's.
        radius: distance of each element of a near start from the truth, network-input
            units.
        steps: gradient evaluations per attack. Default: the preset's, mostly fewer than
            published.
        restarts: tries per target. Default: the preset's.
        labels: whether the attacker knows them, or infers them from the gradient.
        mean: per channel mean of the normalisation that made ``x``.
        std: per channel standard deviation of it. With both, images are kept in pixel
            range [0, 1].
        data_range: largest pixel value, the smallest being 0; with it images are kept
            in that range. Without it and without mean and std there is no box.
        noise_std: standard deviation of the Gaussian noise that is added to each entry
            of the shared gradients.
        perturb: a defense, applied before the noise.
        images: samples in each target.
        seed: of the starts and the noise.
        dtype: arithmetic. float32 ends at about 1e-6 of the gradient; float64 goes on.
        criterion: ``criterion(module, x, y)`` → one loss per sample.
        prepare: what becomes of a batch of inputs before the network gets it, a
            differentiable function; the attacker knows it, and looks for ``x`` as it
            goes in.
        parameters: which of them are shared, see
            :class:`leakwatch.derivatives.GradientMap`. Default: all that are trained.
        time_limit: seconds for the attack and all that prepares it. It ends before the
            step that would go beyond, at the latest after one more; judging the result
            comes on top, three gradients of each target.
        progress: ``True`` for a line on stderr, or a callable, see
            :data:`leakwatch.attacks.base.Progress`.
        overrides: other settings of the preset, such as ``lr``, ``tv``, ``distance``,
            ``signed``; see :class:`leakwatch.attacks.first_order.FirstOrder`.

    Returns:
        The best images, with a status for each target.

    Raises:
        ValueError: for bad arguments: an unknown preset or setting, labels out of
            range, samples that can't be divided into targets.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(9, 6),
        ...                           torch.nn.Sigmoid(), torch.nn.Linear(6, 3))
        >>> x, y = torch.rand(2, 1, 3, 3), torch.tensor([0, 2])
        >>> result = attack(net, x, y, "lavp-l2", steps=20, data_range=1.0)
        >>> result.images.shape, result.restart_loss.shape
        (torch.Size([2, 1, 3, 3]), torch.Size([3, 2]))
    """
    began = time.perf_counter()
    seed = check_arguments(seed, restarts, progress)
    if time_limit is not None:
        time_limit = check_number("time_limit", time_limit, example=60.0)
    check_integer("images", images, example=1)
    for name, function in (("perturb", perturb), ("criterion", criterion)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function, got {function!r}.")
    check_function("prepare", prepare, "prepare(x) → network inputs")
    check_number("noise_std", noise_std, "[0, inf)", example=1e-3)
    chosen = presets.resolve(preset, steps, overrides)
    if labels not in ("known", "inferred"):
        raise ValueError(f"labels must be 'known' or 'inferred', got {labels!r}.")
    gradients = GradientMap(
        module, criterion, prepare=prepare, parameters=parameters, dtype=dtype
    )
    x, y = gradients.checked(x, y)
    shared = SharedGradient.of(
        gradients,
        x,
        y,
        images=images,
        noise_std=noise_std,
        generator=torch.Generator().manual_seed(seed),
        perturb=perturb,
    )
    if labels == "inferred":
        if y.ndim != 1 or y.is_floating_point() or y.dtype == torch.bool:
            raise ValueError(
                "labels='inferred' reads class indices off the last layer's gradient; "
                f"targets of shape {tuple(y.shape[1:])} and {y.dtype} have to be "
                "known: labels='known'."
            )
        shared = shared.without_labels()
    begins = chosen.start if start is None else start
    if not isinstance(begins, Start):
        begins = Start.near(x, radius) if begins == "near" else Start(begins)
    mean, std = check_normalization(mean, std, x)
    pixels = PixelScale.of(mean, std, data_range)
    _check_range(pixels.to_pixels(x), pixels)
    if time_limit is not None:
        # The first gradient of a network takes a while: how to evaluate it is chosen.
        time_limit = max(time_limit - (time.perf_counter() - began), 1e-3)
    with following(progress) as told:
        return chosen.attack.run(
            gradients,
            shared,
            pixels=pixels,
            start=begins,
            seed=seed,
            restarts=chosen.restarts if restarts is None else restarts,
            time_limit=time_limit,
            progress=told,
        )


def _check_range(seen: Tensor, pixels: PixelScale) -> None:
    """Raises if the true images lie where the attack may not look."""
    if pixels.low is None or pixels.high is None:
        return
    least, most = float(seen.amin()), float(seen.amax())
    slack = 1e-3 * (pixels.high - pixels.low)
    if least < pixels.low - slack or most > pixels.high + slack:
        raise ValueError(
            f"the samples' pixels lie in [{least:.3g}, {most:.3g}], outside of "
            f"[{pixels.low:g}, {pixels.high:g}] in which the attack looks for them; "
            f"give the mean and std of the normalisation, or the right data_range."
        )
