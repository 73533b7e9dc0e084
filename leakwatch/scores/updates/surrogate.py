"""The network between w_0 and w_T at which a client's update looks like a gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from leakwatch.derivatives import GradientMap
from leakwatch.scores.result import ACCURATE
from leakwatch.status import describe_error
from leakwatch.weight_update import WeightUpdate, search_segment

__all__ = ["Mismatch", "Surrogate"]

# Per-sample gradients formed at once stay below this.
_GROUP_BYTES = 256 * 2**20
_GRID = 11
_TOLERANCE = 1e-3
_EPS = {kind: torch.finfo(kind).eps for kind in (torch.float32, torch.float64)}
# In units of the last place, where it can't be measured.
_ASSUMED = 32


@final
@dataclass(frozen=True, eq=False)
class Mismatch:
    """What an attacker who takes the update for a gradient at ŵ overlooks.

    Attributes:
        delta: δ = s (w_0 − w_T) − g_ŵ(X), ``(d_θ,)``, float64.
        factor: s = ⟨w_0 − w_T, g_ŵ(X)⟩/‖w_0 − w_T‖², which makes δ smallest.
        gradient: g_ŵ(X), the mean gradient of the client's samples, ``(d_θ,)``,
            float64.
        rounding: what the arithmetic of weights and gradient does to δ, as a norm. That
            of the weights is part of what a client shares.
        uncertainty: the gradient's part, which is an error of δ.
    """

    delta: Float[Tensor, " d_theta"]
    factor: float
    gradient: Float[Tensor, " d_theta"]
    rounding: float
    uncertainty: float = 0.0

    @property
    def direction(self) -> tuple[float, Float[Tensor, " d_theta"]]:
        """‖g_ŵ(X)‖ and g_ŵ(X)/‖g_ŵ(X)‖, zero where the gradient vanishes."""
        size = float(self.gradient.norm())
        return size, self.gradient / size if size > 0 else self.gradient

    @property
    def doubt(self) -> float:
        """How much of δ may be an error, relative."""
        size = float(self.delta.norm())
        return self.uncertainty / size if size > 0 else math.inf

    @property
    def judged(self) -> bool:
        """Whether δ is accurate, so that each score can tell what its errors do."""
        return self.doubt <= ACCURATE

    @property
    def entry_error(self) -> float:
        """Error of each entry of δ that scores must reckon with.

        0 where δ is mostly error: then its size is all that scores can say, and a bound
        would only hide that it is small.
        """
        return self.uncertainty / math.sqrt(len(self.delta)) if self.judged else 0.0

    @property
    def noise_std(self) -> float:
        """δ's energy per coordinate, √(‖δ‖²/d_θ), and at least that of rounding."""
        size = max(float(self.delta.norm()), self.rounding)
        return size / math.sqrt(len(self.delta))


@final
class Surrogate:
    """The mean gradient of a client's samples at ŵ = αw_0 + (1−α)w_T.

    SME (Zhu et al., ICML 2023, Sec. 4) takes the update w_0 − w_T of many local steps
    for a gradient at one such ŵ, up to a factor, because these steps hardly leave a
    plane.

    Mean gradients are in float64 whatever the map's dtype: a small difference of the
    update and a gradient has lost the digits that float32 had. A network that float64
    is too much for is evaluated in the map's.

    Args:
        gradients: the map; its module's weights don't count, nor does their dtype. They
            are replaced while something is evaluated and put back afterwards; not for
            use in threads.
        update: what the clients share.
        client: position of one of them.

    Raises:
        ValueError: if the update has another number of weights than the module shares,
            or the criterion has weights of its own.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(3, 2).double()
        >>> w, x, y = torch.nn.utils.parameters_to_vector(net.parameters()).detach(), (
        ...     torch.rand(4, 3).double()), torch.tensor([0, 1, 1, 0])
        >>> gradients = GradientMap(net, dtype=torch.float64)
        >>> step = w - 0.1 * gradients(x, y).mean(0)
        >>> update = WeightUpdate(w, step[None], None, (3,), 4)
        >>> similarity = Surrogate(gradients, update, 0).similarity(x, y, 1.0)
        >>> round(similarity, 12)  # one step of gradient descent is a gradient at w_0
        1.0
    """

    def __init__(
        self, gradients: GradientMap, update: WeightUpdate, client: int
    ) -> None:
        sizes = gradients.sizes()
        own = dict(gradients.module.named_parameters())
        foreign = [name for name in sizes if name not in own]
        if foreign:
            raise ValueError(
                f"the criterion has weights of its own ({', '.join(foreign[:3])}); "
                f"pass one without, as a client's update holds the module's only."
            )
        if gradients.size != update.initial.numel():
            raise ValueError(
                f"the update has {update.initial.numel()} weights, but the module "
                f"shares {gradients.size}; pass the module that the clients trained, "
                f"with the same weights frozen."
            )
        self.gradients = gradients
        self._parameters = [own[name] for name in sizes]
        place = self._parameters[0].device
        self._initial = update.initial.detach().to(place, torch.float64)
        self._final = update.final[client].detach().to(place, torch.float64)
        self._difference = self._initial - self._final
        self._eps = torch.finfo(update.final.dtype).eps
        self._precise: GradientMap | None = None

    @contextmanager
    def at(self, alpha: float) -> Iterator[GradientMap]:
        """The gradient map at ŵ.

        Args:
            alpha: α; 1 is w_0, 0 is w_T.

        Yields:
            The map, whose module holds ŵ in float64 until the end of the block, and
            which rounds it to its own dtype.
        """
        weights = alpha * self._initial + (1 - alpha) * self._final
        modules = [module for _, module in self.gradients.named_modules()]
        with _placed(modules, self._parameters, weights):
            yield self.gradients

    def gradient(
        self, x: Float[Tensor, "n ..."], y: Int[Tensor, " n"], alpha: float
    ) -> Float[Tensor, " d_theta"]:
        """g_ŵ(X) = (1/N) Σ ∇ℓ(ŵ; x_i), float64.

        Args:
            x: the client's samples, network inputs.
            y: their labels.
            alpha: of ŵ.
        """
        with self.at(alpha):
            return _mean(self._exact(x, y), x, y)[0]

    def _exact(self, x: Tensor, y: Tensor) -> GradientMap:
        """The map in float64, unless the network can't be evaluated so."""
        if self._precise is None:
            # The map itself examines the module, and keeps what it finds.
            self.gradients(x[:1], y[:1])
            precise = self.gradients.in_dtype(torch.float64)
            try:
                precise(x[:1], y[:1])
            except Exception as error:
                self.gradients.note(
                    "the mismatch is as inexact as float32, in which alone it can be "
                    f"evaluated ({describe_error(error)})"
                )
                precise = self.gradients
            self._precise = precise
        return self._precise

    def similarity(
        self, x: Float[Tensor, "n ..."], y: Int[Tensor, " n"], alpha: float
    ) -> float:
        """Cosine between w_0 − w_T and g_ŵ(X); NaN where that gradient vanishes."""
        return self.cosine(self.gradient(x, y, alpha))

    def cosine(self, gradient: Float[Tensor, " d_theta"]) -> float:
        """Cosine between w_0 − w_T and a gradient; NaN where that vanishes."""
        lengths = float(gradient.norm()) * float(self._difference.norm())
        return float(gradient @ self._difference) / lengths if lengths > 0 else math.nan

    def best_alpha(self, x: Float[Tensor, "n ..."], y: Int[Tensor, " n"]) -> float:
        """The α in [0, 1] with the largest similarity, to within 0.001.

        Args:
            x: the client's samples, network inputs.
            y: their labels.

        Returns:
            α; NaN where the gradient vanishes all along the segment.
        """
        return search_segment(
            lambda alpha: self.similarity(x, y, alpha),
            points=_GRID,
            tolerance=_TOLERANCE,
        ).best_alpha

    def mismatch(
        self, x: Float[Tensor, "n ..."], y: Int[Tensor, " n"], alpha: float
    ) -> Mismatch:
        """What of g_ŵ(X) the update does not show.

        s could also be 1/(T·lr) where the server knows both, or ‖g‖/‖w_0 − w_T‖. For
        an attacker who matches directions, s is free; least squares makes δ smallest
        and orthogonal to the update.

        Args:
            x: the client's samples, network inputs.
            y: their labels.
            alpha: of ŵ.
        """
        with self.at(alpha):
            g, size = _mean(self._exact(x, y), x, y)
            uncertainty = self._error(g, size, x, y)
        squared = self._difference.square().sum()
        factor = float(self._difference @ g / squared)
        ends = float(torch.stack([self._initial, self._final]).norm())
        return Mismatch(
            delta=factor * self._difference - g,
            factor=factor,
            gradient=g,
            rounding=math.hypot(abs(factor) * self._eps * ends, uncertainty),
            uncertainty=uncertainty,
        )

    def _error(self, g: Tensor, size: float, x: Tensor, y: Tensor) -> float:
        """How far rounding has moved g, as a norm.

        float64 loses as many digits of its own as float32 does, whose error is the
        difference of the two.
        """
        dtype = self._exact(x, y).dtype
        assumed = _ASSUMED * _EPS[dtype] * size
        if dtype != torch.float64:
            return assumed
        try:
            rounded, _ = _mean(self.gradients.in_dtype(torch.float32), x, y)
        except Exception as error:
            self.gradients.note(
                "how much rounding changes its gradient is assumed, not measured: "
                f"float32 fails ({describe_error(error)})"
            )
            return assumed
        apart = float((rounded - g).norm()) * _EPS[dtype] / _EPS[torch.float32]
        return apart if math.isfinite(apart) else assumed


def gradients_at_once(gradients: GradientMap) -> int:
    """How many per-sample gradients are formed at once."""
    return max(1, _GROUP_BYTES // (gradients.dtype.itemsize * gradients.size))


def _mean(gradients: GradientMap, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """(1/N) Σ g_i in float64, and (1/N) Σ ‖g_i‖."""
    each = gradients_at_once(gradients)
    total: Tensor | float = 0.0
    size = 0.0
    for i in range(0, len(x), each):
        part = gradients(x[i : i + each], y[i : i + each]).double()
        total = total + part.sum(0)
        size += float(part.norm(dim=1).sum())
    return torch.as_tensor(total) / len(x), size / len(x)


@contextmanager
def _placed(
    modules: Iterable[nn.Module],
    parameters: Sequence[nn.Parameter],
    weights: Float[Tensor, " d_theta"],
) -> Iterator[None]:
    """Other parameters in the modules' registries, of the weights' dtype.

    Not other data in the parameters: another dtype would cut them off from what
    others, as data-parallel training, have hung on their gradients.
    """
    places = torch.split(weights, [p.numel() for p in parameters])
    others = {
        id(p): nn.Parameter(part.view(p.shape).to(p.device))
        for p, part in zip(parameters, places, strict=True)
    }
    registries = [module._parameters for module in modules]
    own = [dict(registry) for registry in registries]
    try:
        for registry in registries:
            for name, p in registry.items():
                registry[name] = others.get(id(p), p)
        yield
    finally:
        for registry, before in zip(registries, own, strict=True):
            registry.update(before)
