"""Scores of a batch in one call."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, final, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from leakwatch.checks import (
    check_choice,
    check_function,
    check_number,
    check_samples,
    check_tensor,
)
from leakwatch.derivatives import Criterion, GradientMap, Prepare
from leakwatch.derivatives.parameter_filters import ParameterFilter
from leakwatch.names import meant
from leakwatch.normalization import (
    Channels,
    check_normalization,
    per_channel,
    to_pixels,
)
from leakwatch.priors import DensePrior, GaussianPrior, natural_prior
from leakwatch.scores.batches import score_samples
from leakwatch.scores.measure.inputs import ScoreInputs
from leakwatch.scores.measure.plan import (
    DEFAULT_PRODUCTS,
    Plan,
    PrecisionName,
    Solver,
    check_solver,
    plan,
)
from leakwatch.scores.registry import Score, resolve
from leakwatch.scores.result import ScoreResult, columns
from leakwatch.scores.settings import UNIFORM_STD, Settings

__all__ = [
    "DEFAULT_MAX_MEMORY",
    "PriorName",
    "Scoring",
    "as_prior",
    "check_prior",
    "score",
]

#: What an attacker may know of images: mean and spread of the pixels, the statistics of
#: the data set, those of photographs.
PriorName: TypeAlias = Literal["white", "data", "natural"]

#: MiB that the Jacobian of one sample may take before ``auto`` gives up the exact way.
DEFAULT_MAX_MEMORY = 2048


@final
@dataclass(frozen=True, eq=False)
class Scoring:
    """How samples are scored: what :func:`score` is told about all of them.

    :func:`score`, the callbacks and ``leakwatch audit`` all make their gradient map,
    settings and scores with it. An argument of :func:`score` that is no attribute here
    belongs to single samples.

    Attributes:
        scores: what to compute.
        noise_std: as in :func:`score`, like all that follow.
        epsilon: of I²F.
        prior_std: ``None`` for that of the samples.
        prior: what the attacker knows of images; ``None`` for the statistics of the
            data where they were measured and no ``prior_std`` is stated, else
            ``"white"``.
        data_range: ``None`` for that of the samples.
        target_psnr: for ``noise_std_for_psnr``.
        influence_steps: for a given perturbation.
        criterion: one loss per sample.
        parameters: which are shared.
        solver: of the spectrum.
        dtype: of gradients and scores.
        max_memory: MiB for the Jacobian of one sample.
        products: most products with it for each task.
        prepare: what becomes of inputs before the network gets them.
        precision: how much ``auto`` looks at.

    Raises:
        TypeError: for anything but numbers.
        ValueError: for an unknown solver or prior, or numbers out of range.
    """

    scores: tuple[Score, ...]
    noise_std: float | None = None
    epsilon: float = 0.0
    prior_std: float | None = None
    prior: PriorName | GaussianPrior | None = None
    data_range: float | None = None
    target_psnr: float = 20.0
    influence_steps: int = 1
    criterion: Criterion | None = None
    parameters: ParameterFilter | None = None
    solver: Solver = "auto"
    dtype: torch.dtype = torch.float32
    max_memory: float = DEFAULT_MAX_MEMORY
    products: int = DEFAULT_PRODUCTS
    prepare: Prepare | None = None
    precision: PrecisionName = "exact"

    def __post_init__(self) -> None:
        check_solver(self.solver)
        check_choice("precision", self.precision, get_args(PrecisionName))
        check_prior(self.prior, self.prior_std)
        if self.data_range is not None:
            check_number("data_range", self.data_range, example=1.0)
        check_number("max_memory", self.max_memory, example=DEFAULT_MAX_MEMORY)
        check_number("products", self.products, example=DEFAULT_PRODUCTS)

    def gradient_map(self, module: nn.Module) -> GradientMap:
        """The map from a sample to the gradient that it would share.

        Args:
            module: the network.
        """
        return GradientMap(
            module,
            self.criterion,
            prepare=self.prepare,
            parameters=self.parameters,
            dtype=self.dtype,
        )

    def settings(
        self,
        shape: tuple[int, ...],
        *,
        prior_std: float | None = None,
        measured: GaussianPrior | None = None,
        data_range: float = 1.0,
    ) -> Settings:
        """What the scores assume.

        Args:
            shape: of one sample.
            prior_std: of the samples, where none is stated; default: that of pixels
                uniform on the data range.
            measured: the statistics of the data, where they are known.
            data_range: of the samples, where none is stated.

        Raises:
            ValueError: for numbers out of range, a prior of other samples, and
                ``prior="data"`` where no statistics were measured.
        """
        if self.data_range is not None:
            data_range = self.data_range
        prior = self._prior(shape, measured, data_range)
        if self.prior_std is not None:
            prior_std = self.prior_std
        return Settings(
            noise_std=self.noise_std,
            epsilon=self.epsilon,
            prior_std=data_range * UNIFORM_STD if prior_std is None else prior_std,
            data_range=data_range,
            target_psnr=self.target_psnr,
            prior=prior,
            influence_steps=self.influence_steps,
        )

    def _prior(
        self, shape: tuple[int, ...], measured: GaussianPrior | None, peak: float
    ) -> GaussianPrior | None:
        chosen = self.prior
        if chosen is None:
            chosen = "white" if measured is None or self.prior_std else "data"
        if chosen == "white":
            return None
        if chosen == "natural":
            return natural_prior(shape, data_range=peak)
        if chosen == "data":
            if measured is None:
                raise ValueError(
                    "prior='data' needs statistics of the data, which were not "
                    "measured; give prior=measured_prior(samples) with at least 16 "
                    "samples in pixel units (leakwatch.priors), or 'natural' or "
                    "'white'."
                )
            chosen = measured
        chosen.check(shape)
        return chosen

    def plan(self, inputs: ScoreInputs, settings: Settings) -> Plan:
        """How samples are measured.

        Args:
            inputs: the samples, of which the first counts.
            settings: from :meth:`settings`.
        """
        return plan(
            [s.needs for s in self.scores],
            inputs,
            settings,
            solver=self.solver,
            max_memory=self.max_memory,
            products=self.products,
            precision=self.precision,
        )

    def evaluate(
        self, inputs: ScoreInputs, settings: Settings, *, started: float | None = None
    ) -> ScoreResult:
        """The scores of samples that have been checked.

        Args:
            inputs: samples at a network, with a map of :meth:`gradient_map`.
            settings: from :meth:`settings`.
            started: ``time.perf_counter()`` at the start.

        Returns:
            The scores. A sample that can't be scored has the status ``failed``.

        Raises:
            ValueError: for a perturbation of another shape, an empty batch, missing
                noise_std, or an influence path that can't be followed.
            Exception: that which stopped every single sample.
        """
        started = time.perf_counter() if started is None else started
        if len(inputs) == 0:
            raise ValueError("there is no sample to score: the batch is empty.")
        _check_noise(self.scores, settings, inputs.delta)
        _check_delta(inputs)
        if settings.prior is not None and inputs.pixels is not None:
            mean = settings.prior.mean.to(inputs.pixels).flatten()
            _check_units(inputs.gradients, inputs.pixels, mean, settings.data_range)
            inputs = replace(inputs, offset=inputs.pixels - mean)
        chosen = self.plan(inputs, settings)
        _check_path(settings, chosen, inputs.delta)
        rows = score_samples(inputs, self.scores, settings, chosen)
        spectra = None
        if chosen.solver == "exact":
            lost = torch.full((inputs.x[0].numel(),), math.nan, dtype=torch.float64)
            spectra = torch.stack(
                [lost if row.eigenvalues is None else row.eigenvalues for row in rows]
            )
        numbers, status = columns([row.values for row in rows], self.dtype)
        return ScoreResult(
            numbers=numbers,
            status=status,
            solver=chosen.solver,
            reason=chosen.reason,
            eigenvalues=spectra,
            traces={
                name: torch.tensor(
                    [row.traces.get(name, math.nan) for row in rows]
                ).double()
                for name in dict.fromkeys(name for row in rows for name in row.traces)
            },
            seconds=time.perf_counter() - started,
        )


def score(
    module: nn.Module,
    x: Float[Tensor, "batch ..."],
    y: Int[Tensor, " batch"],
    scores: str | Score | Iterable[str | Score] = ("lavp", "i2f"),
    *,
    noise_std: float | None = None,
    delta: Float[Tensor, "batch d_theta"] | None = None,
    epsilon: float = 0.0,
    prior_std: float | None = None,
    prior_mean: Float[Tensor, "*sample"] | None = None,
    prior: PriorName | GaussianPrior | Float[Tensor, "d_x d_x"] | None = None,
    mean: Channels | None = None,
    std: Channels | None = None,
    data_range: float = 1.0,
    target_psnr: float = 20.0,
    influence_steps: int = 1,
    criterion: Criterion | None = None,
    prepare: Prepare | None = None,
    parameters: ParameterFilter | None = None,
    solver: Solver = "auto",
    dtype: torch.dtype = torch.float32,
    max_memory: float = DEFAULT_MAX_MEMORY,
    products: int = DEFAULT_PRODUCTS,
    precision: PrecisionName = "exact",
) -> ScoreResult:
    """Leakage scores of each sample, without attacking.

    Args:
        module: the network, on any device; left as it was. ``forward(x)`` gives
            logits, unless ``criterion`` says otherwise.
        x: network inputs, floating point.
        y: class indices.
        scores: names or groups (``"lavp"``, ``"i2f"``, ``"bayes"``, ``"range"``,
            ``"norms"``), or :class:`Score` objects of your own.
        noise_std: s, standard deviation of the Gaussian noise assumed on each entry of
            the shared gradient, in gradient units. The I²F and Bayesian scores need it.
        delta: one perturbation of each sample's gradient, instead of an average over
            Gaussian noise; in the order of ``named_parameters()``. The Bayesian scores
            need ``noise_std`` beside it.
        epsilon: damping of I²F, in units of the eigenvalues of H.
        prior_std: R, standard deviation of a pixel around the prior mean, pixel
            units. Default: that of a pixel uniform on the data range, range/√12.
        prior_mean: mean image in pixel units, the shape of one sample; for the scores
            of attackers who know the range, and with ``delta``. Default: half the data
            range.
        prior: what the attacker of the Bayesian scores knows of images: ``"white"``
            (the default: independent pixels, ``prior_mean`` and R), ``"natural"`` (the
            statistics of photographs), a prior measured on images like yours
            (:func:`leakwatch.priors.measured_prior`), one of your own, or a covariance
            matrix around ``prior_mean``, pixel units squared.
        mean: per channel mean of the normalisation that made ``x``.
        std: per channel standard deviation of it. With both, all scores are in pixel
            units; without, pixels are network inputs.
        data_range: peak of the PSNR in pixel units: 1 for images in [0, 1].
        target_psnr: dB, for ``noise_std_for_psnr``.
        influence_steps: with a ``delta``, steps in which ``i2f_bayes`` follows the best
            reconstruction while the noise is switched on; 1 is the linear prediction.
            8 are closer to attacks where noise moves images far (ReLU networks, and
            samples that a trained network gets wrong), at 8 times the cost.
        criterion: ``criterion(module, x, y)`` → one loss per sample.
        prepare: what becomes of a batch of inputs before the network gets it, a
            differentiable function; scores are about ``x`` as it goes in.
        parameters: which parameters are shared, if not all that require gradients:
            names, patterns (``"fc"``, ``["head.*", "*.bias"]``) or a function of name
            and parameter.
        solver: ``"auto"``, ``"exact"``, ``"lanczos"`` or ``"power"``. ``"lanczos"`` is
            the matrix-free one: λ_1 with a residual, λ_min as an interval, sums over
            the spectrum (expected I²F, Bayesian scores) from random starts with
            standard errors, and I²F for a given ``delta`` by damped least squares.
        dtype: float32 or float64.
        max_memory: MiB for the Jacobian of one sample, or what stands for it, and for
            the tangents that it is formed from; some 100 MiB and five matrices of
            8 d_x² bytes come on top. Beyond it ``"auto"`` is not exact, and ``"exact"``
            goes over the parameters in parts, which takes longer. ``"lanczos"`` keeps
            its vectors, tangents and graphs within it; a note says beforehand where
            one product takes more.
        products: most products with J and Jᵀ per sample that ``"lanczos"`` takes for
            each of its tasks: ends, ends for the cosine distance, sums, and each of two
            inverses for a ``delta``. A task stops earlier when it is done, or when so
            many can't be enough.
        precision: ``"exact"``, or ``"dashboard"``: with a ``prior`` that is not white
            and inputs of more than 256 elements, ``solver="auto"`` looks at the leading
            64, 128 or 256 components of the prior, where people recognise images,
            instead of the whole spectrum. Predictions are then those of a linear
            network, and their status says how far off they may be, or that exposure is
            at least that; smallest eigenvalues, and what needs them, are not computed.

    Returns:
        The scores, each with a status for every sample.

    Raises:
        ValueError: for bad arguments: unknown score or solver, labels out of range,
            non-finite or integer inputs, missing noise_std, ``influence_steps`` without
            a delta or with another solver than ``"exact"``.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Sigmoid(),
        ...                           torch.nn.Linear(6, 3))
        >>> result = score(net, torch.rand(2, 4), torch.tensor([0, 2]), noise_std=1e-3)
        >>> result["lavp_l2_max"].shape, str(result.status["i2f"][0])
        (torch.Size([2]), 'ok')
    """
    started = time.perf_counter()
    check_samples(x, y)
    check_number("data_range", data_range, example=1.0)
    check_function("prepare", prepare, "prepare(x) → network inputs")
    for name, tensor in (("delta", delta), ("prior_mean", prior_mean)):
        if tensor is not None:
            check_tensor(name, tensor)
    scoring = Scoring(
        resolve(scores),
        noise_std=noise_std,
        epsilon=epsilon,
        prior_std=prior_std,
        prior=as_prior(prior, x, prior_mean, data_range),
        data_range=data_range,
        target_psnr=target_psnr,
        influence_steps=influence_steps,
        criterion=criterion,
        prepare=prepare,
        parameters=parameters,
        solver=solver,
        dtype=dtype,
        max_memory=max_memory,
        products=products,
        precision=precision,
    )
    settings = scoring.settings(tuple(x.shape[1:]))
    _check_noise(scoring.scores, settings, delta)
    gradients = scoring.gradient_map(module)
    x, y = gradients.checked(x, y)
    mean, std = check_normalization(mean, std, x, data_range)
    if mean is None and not bool((x.amin() >= 0) & (x.amax() <= data_range)):
        gradients.note(
            f"inputs leave [0, {data_range:g}] and no mean and std were given, so "
            f"scores are in network-input units and every PSNR refers to a range of "
            f"{data_range:g} there; give mean and std of the normalisation, or "
            f"data_range=255 for bytes"
        )
    inputs = ScoreInputs(
        gradients,
        x,
        y,
        input_scale=input_scale_of(x, std),
        offset=offset_of(x, mean, std, prior_mean, data_range),
        pixels=pixels_of(x, mean, std),
        delta=None if delta is None else delta.detach().to(x.device),
    )
    return scoring.evaluate(inputs, settings, started=started)


def _check_units(
    gradients: GradientMap, pixels: Tensor, mean: Tensor, data_range: float
) -> None:
    """Notes a prior whose mean can't be one of pixels that lie in their range."""
    slack = 0.1 * data_range
    seen, known = ((float(v.amin()), float(v.amax())) for v in (pixels.detach(), mean))
    inside = [
        low >= -slack and high <= data_range + slack for low, high in (seen, known)
    ]
    if inside == [True, False]:
        gradients.note(
            f"the mean of the prior lies in [{known[0]:.3g}, {known[1]:.3g}], and "
            f"pixels in [0, {data_range:g}]: measure the prior from pixels, not from "
            f"normalised inputs"
        )


def _check_noise(
    scores: Sequence[Score], settings: Settings, delta: Tensor | None
) -> None:
    names = [s.name for s in scores if "noise" in s.needs]
    if names and settings.noise_std is None and delta is None:
        raise ValueError(
            f"{', '.join(names)} need noise_std, the standard deviation of the noise "
            f"assumed on the shared gradient (for instance noise_std=1e-2), or a delta."
        )


def _check_path(settings: Settings, chosen: Plan, delta: Tensor | None) -> None:
    if settings.influence_steps == 1:
        return
    if delta is None:
        raise ValueError(
            f"influence_steps={settings.influence_steps} follows one perturbation of "
            f"the gradient: give its delta, or leave influence_steps out."
        )
    if chosen.solver != "exact":
        raise ValueError(
            f"influence_steps={settings.influence_steps} needs solver='exact', but the "
            f"solver is {chosen.solver} ({chosen.reason})."
        )


def _check_delta(inputs: ScoreInputs) -> None:
    delta = inputs.delta
    if delta is not None:
        expected = (len(inputs), inputs.gradients.size)
        if tuple(delta.shape) != expected or not delta.is_floating_point():
            raise ValueError(
                f"delta must hold one floating point perturbation of the gradient per "
                f"sample, (batch, d_θ) = {expected}, got {tuple(delta.shape)} of "
                f"{delta.dtype}."
            )
        if not bool(torch.isfinite(delta).all()):
            raise ValueError("delta must be finite, but holds NaN or infinity.")


def check_prior(prior: object, prior_std: float | None = None) -> None:
    """Whether something says what an attacker knows of images.

    Args:
        prior: a name, a prior, or ``None``.
        prior_std: stated beside it.

    Raises:
        TypeError: for anything else.
        ValueError: for an unknown name, or a spread beside a prior that has its own.
    """
    names = get_args(PriorName)
    if isinstance(prior, str):
        if prior not in names:
            raise ValueError(
                f"prior must be one of {names} or a GaussianPrior, "
                f"{meant(prior, names)}got {prior!r}."
            )
    elif not (prior is None or isinstance(prior, GaussianPrior)):
        raise TypeError(
            f"prior must be one of {names} or a GaussianPrior, got "
            f"{type(prior).__name__}; see leakwatch.priors."
        )
    if prior_std is not None and prior not in (None, "white"):
        raise ValueError(
            f"prior_std={prior_std} is the spread of independent pixels, but the prior "
            f"has one of its own; leave prior_std out, or give prior='white'."
        )


def as_prior(
    prior: PriorName | GaussianPrior | Tensor | None,
    x: Tensor,
    prior_mean: Tensor | None,
    data_range: float,
) -> PriorName | GaussianPrior | None:
    """What was given as a prior, with a matrix as the covariance around a mean.

    Args:
        prior: what was given.
        x: samples, of which the shape counts.
        prior_mean: μ, given beside it.
        data_range: of the pixels.

    Raises:
        ValueError: for a mean beside a prior that has its own.
    """
    if not isinstance(prior, Tensor):
        if prior not in (None, "white") and prior_mean is not None:
            raise ValueError(
                "prior_mean is the mean of independent pixels, but the prior has one "
                "of its own; leave prior_mean out."
            )
        return prior
    mean = prior_mean
    if mean is None:
        mean = torch.full(x.shape[1:], data_range / 2, dtype=torch.float64)
    return DensePrior(mean, prior)


def input_scale_of(
    x: Float[Tensor, "batch ..."], std: Sequence[float] | None
) -> Float[Tensor, " d_x"] | None:
    """d(input)/d(pixel) of each input element.

    Args:
        x: network inputs, of which the shape counts.
        std: per channel standard deviation of the normalisation.

    Raises:
        ValueError: for another number of channels.
    """
    if std is None:
        return None
    one = torch.ones(1, *x.shape[1:], dtype=torch.float64, device=x.device)
    return (one / per_channel(std, one)).flatten()


def pixels_of(
    x: Float[Tensor, "batch ..."],
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> Float[Tensor, "batch d_x"]:
    """Samples in pixel units, flattened, float64.

    Args:
        x: network inputs.
        mean: per channel, of the normalisation.
        std: the same.

    Raises:
        ValueError: for another number of channels.
    """
    return to_pixels(x.double(), mean, std).reshape(len(x), -1)


def offset_of(
    x: Float[Tensor, "batch ..."],
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    prior_mean: Tensor | None,
    data_range: float,
) -> Float[Tensor, "batch d_x"]:
    """Distance from the prior mean, x − μ, in pixel units, flattened, float64.

    Args:
        x: network inputs.
        mean: per channel, of the normalisation.
        std: the same.
        prior_mean: μ in pixel units, the shape of one sample; default: half the range.
        data_range: of the pixels.

    Raises:
        ValueError: for another shape, or numbers that are not finite.
    """
    pixels = pixels_of(x, mean, std).view(x.shape)
    centre = torch.full_like(pixels[0], data_range / 2)
    if prior_mean is not None:
        if prior_mean.shape != centre.shape or not prior_mean.isfinite().all():
            raise ValueError(
                f"prior_mean must be finite and have the shape of one sample, "
                f"{tuple(centre.shape)}, got {tuple(prior_mean.shape)}."
            )
        centre = prior_mean.to(pixels)
    return (pixels - centre).reshape(len(x), -1)
