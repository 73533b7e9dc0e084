"""Scores of a batch in one call."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from leakwatch.gradients import Criterion, GradientMap
from leakwatch.jacobian import GradientJacobian
from leakwatch.scores.evidence import Settings
from leakwatch.scores.planner import Plan, Solver, check_solver, measure, plan
from leakwatch.scores.registry import Score, resolve
from leakwatch.scores.result import ScoreResult, Status

#: MiB that the Jacobian of one sample may take before ``auto`` gives up the exact way.
DEFAULT_MAX_MEMORY = 2048
_GROUP_BYTES = 512 * 2**20


def score(
    module: nn.Module,
    x: Float[Tensor, "batch ..."],
    y: Int[Tensor, " batch"],
    scores: str | Iterable[str] = ("lavp", "i2f"),
    *,
    noise_std: float | None = None,
    delta: Float[Tensor, "batch d_theta"] | None = None,
    epsilon: float = 0.0,
    prior_std: float | None = None,
    prior_mean: Float[Tensor, "..."] | None = None,
    prior_covariance: Float[Tensor, "d_x d_x"] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    data_range: float = 1.0,
    target_psnr: float = 20.0,
    criterion: Criterion | None = None,
    solver: Solver = "auto",
    dtype: torch.dtype = torch.float32,
    max_memory: int = DEFAULT_MAX_MEMORY,
) -> ScoreResult:
    """Leakage scores of each sample, without attacking.

    Args:
        module: the network, on any device; left as it was. ``forward(x)`` gives
            logits, unless ``criterion`` says otherwise.
        x: network inputs, floating point.
        y: class indices.
        scores: names or groups (``"lavp"``, ``"i2f"``, ``"bayes"``, ``"norms"``).
        noise_std: s, standard deviation of the Gaussian noise assumed on each entry of
            the shared gradient, in gradient units. The I²F and Bayesian scores need it.
        delta: one perturbation of each sample's gradient, instead of an average over
            Gaussian noise; in the order of ``named_parameters()``.
        epsilon: damping of I²F, in units of the eigenvalues of H.
        prior_std: R, standard deviation of a pixel around the prior mean, pixel
            units. Default: that of a pixel uniform on the data range, range/√12.
        prior_mean: mean image in pixel units, the shape of one sample; used with
            ``delta``. Default: half the data range.
        prior_covariance: full prior covariance in pixel units squared, instead of R².
        mean: per channel mean of the normalisation that made ``x``.
        std: per channel standard deviation of it. With both, all scores are in pixel
            units; without, pixels are network inputs.
        data_range: peak of the PSNR in pixel units: 1 for images in [0, 1].
        target_psnr: dB, for ``noise_std_for_psnr``.
        criterion: ``criterion(module, x, y)`` → one loss per sample.
        solver: ``"auto"``, ``"exact"``, ``"lanczos"`` or ``"power"``.
        dtype: float32 or float64.
        max_memory: MiB for the Jacobian of one sample, for ``solver="auto"``.

    Returns:
        The scores, each with a status for every sample.

    Raises:
        ValueError: for bad arguments: unknown score or solver, labels out of range,
            non-finite or integer inputs, missing noise_std.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(4, 3)
        >>> result = score(net, torch.rand(2, 4), torch.tensor([0, 2]), noise_std=1e-3)
        >>> result["lavp_l2_max"].shape, str(result.status["i2f"][0])
        (torch.Size([2]), 'ok')
    """
    started = time.perf_counter()
    wanted = resolve(scores)
    solver = check_solver(solver)
    covers = {"noise"} & set().union(*(s.needs for s in wanted))
    if covers and noise_std is None and delta is None:
        names = ", ".join(s.name for s in wanted if "noise" in s.needs)
        raise ValueError(
            f"{names} need noise_std, the standard deviation of the noise assumed on "
            f"the shared gradient (for instance noise_std=1e-2), or a delta."
        )
    check_positive(noise_std=noise_std, prior_std=prior_std, data_range=data_range)
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"epsilon must be finite and at least 0, got {epsilon}.")
    gradients = GradientMap(module, criterion, dtype=dtype)
    device = next(gradients.module.parameters()).device
    x, y = x.detach().to(device), y.to(device)
    gradients.check(x, y)
    settings = Settings(
        noise_std=noise_std,
        epsilon=epsilon,
        prior_std=data_range * 12**-0.5 if prior_std is None else prior_std,
        data_range=data_range,
        target_psnr=target_psnr,
        prior_covariance=prior_covariance,
    )
    return evaluate(
        gradients,
        x,
        y,
        wanted,
        settings,
        solver=solver,
        max_memory=max_memory,
        input_scale=_input_scale(x, std),
        offset=_offset(x, mean, std, prior_mean, data_range),
        delta=delta,
        started=started,
    )


def evaluate(
    gradients: GradientMap,
    x: Tensor,
    y: Tensor,
    scores: Sequence[Score],
    settings: Settings,
    *,
    solver: Solver = "auto",
    max_memory: int = DEFAULT_MAX_MEMORY,
    input_scale: Tensor | None = None,
    offset: Tensor | None = None,
    delta: Tensor | None = None,
    started: float | None = None,
) -> ScoreResult:
    """:func:`score` for arguments that have been checked.

    Args:
        gradients: the gradient map.
        x: network inputs on the module's device.
        y: labels there.
        scores: resolved scores.
        settings: noise, prior and pixels.
        solver: as in :func:`score`.
        max_memory: as in :func:`score`.
        input_scale: d(input)/d(pixel), ``(d_x,)``.
        offset: x − μ in pixel units, ``(batch, d_x)``; only with ``delta``.
        delta: perturbations, ``(batch, d_θ)``.
        started: ``time.perf_counter()`` at the start.

    Returns:
        The scores.
    """
    started = time.perf_counter() if started is None else started
    values: dict[str, list[float]] = {s.name: [] for s in scores}
    status: dict[str, list[Status]] = {s.name: [] for s in scores}
    spectra: list[Tensor] = []
    chosen: Plan | None = None
    group = max(1, _GROUP_BYTES // (8 * gradients.size))
    vectors = delta is not None or settings.prior_covariance is not None
    for start in range(0, len(x), group):
        part = slice(start, start + group)
        jacobian = GradientJacobian(
            gradients, x[part], y[part], input_scale=input_scale
        )
        if chosen is None:
            chosen = plan(
                scores,
                jacobian,
                solver=solver,
                max_memory=max_memory,
                eigenvectors=vectors,
            )
        pulled = None
        if delta is not None:
            pulled = jacobian.rmatvec(delta[part].to(x.device)).double()
        for evidence in measure(
            jacobian,
            chosen,
            losses=gradients.losses(x[part], y[part]),
            pulled=pulled,
            offset=None if offset is None else offset[part],
        ):
            for s in scores:
                number, word = s.compute(evidence, settings)
                values[s.name].append(number)
                status[s.name].append(word)
            if evidence.eigenvalues is not None:
                spectra.append(evidence.eigenvalues.cpu())
    assert chosen is not None
    return ScoreResult(
        numbers={k: torch.tensor(v, dtype=torch.float64) for k, v in values.items()},
        status={k: tuple(v) for k, v in status.items()},
        solver=chosen.solver,
        reason=chosen.reason,
        eigenvalues=torch.stack(spectra) if spectra else None,
        seconds=time.perf_counter() - started,
    )


def check_positive(**numbers: float | None) -> None:
    """Raises a ValueError for a number that is given and not positive and finite."""
    for name, number in numbers.items():
        if number is not None and not (math.isfinite(number) and number > 0):
            raise ValueError(f"{name} must be positive and finite, got {number}.")


def _input_scale(x: Tensor, std: Sequence[float] | None) -> Tensor | None:
    if std is None:
        return None
    return (1 / _per_channel(x, std, "std")).reshape(-1)


def _per_channel(x: Tensor, numbers: Sequence[float], name: str) -> Tensor:
    """One number per channel, spread over one sample's shape, float64."""
    if x.ndim < 2 or len(numbers) not in (1, x.shape[1]):
        raise ValueError(
            f"{name} must have one entry per channel, {x.shape[1] if x.ndim > 1 else 1}"
            f" here, got {len(numbers)}."
        )
    t = torch.tensor(numbers, dtype=torch.float64, device=x.device)
    return t.view(-1, *[1] * (x.ndim - 2)).expand(x.shape[1:])


def _offset(
    x: Tensor,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    prior_mean: Tensor | None,
    data_range: float,
) -> Tensor:
    pixels = x.double()
    if (mean is None) != (std is None):
        raise ValueError(
            "mean and std describe one normalisation; give both or neither."
        )
    if mean is not None and std is not None:
        pixels = pixels * _per_channel(x, std, "std") + _per_channel(x, mean, "mean")
    centre = (
        torch.full_like(pixels[0], data_range / 2)
        if prior_mean is None
        else prior_mean.to(pixels)
    )
    if centre.shape != pixels.shape[1:]:
        raise ValueError(
            f"prior_mean must have the shape of one sample, {tuple(pixels.shape[1:])}, "
            f"got {tuple(centre.shape)}."
        )
    return (pixels - centre).flatten(1)
