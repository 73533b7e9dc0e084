"""J = ∂g/∂x of a batch of samples, as an operator."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from leakwatch.checks import check_samples, check_shape
from leakwatch.derivatives.gradient_map import GradientMap
from leakwatch.derivatives.gram.gram import Gram, Workspace, gram, grams
from leakwatch.derivatives.graph_products.batch_products import BatchProducts
from leakwatch.derivatives.verification.rounding import normal, scales
from leakwatch.status import OK, Status

_log = logging.getLogger(__name__)

# ‖g‖ below this is raised to it before its reciprocal weighs a float32 loss.
_SMALLEST_NORM = 1e-30
# ‖g‖ below this, or above its reciprocal, may have lost small parts to underflow.
_SMALL = 1e-6
# Share of a gradient that rounding can't have moved.
_MOVED = 1e-4
# Steps that a zero has to bear, as shares of the range, in either direction.
_COARSE = {"level": 1 / 255, "tenth of the range": 0.1, "half of the range": 0.5}
_SIDES = (-1, 1)


@final
class GradientJacobian:
    """The Jacobian of each sample's gradient in its input, d_θ × d_x, never stored.

    All products are taken with the loss divided by about ‖g‖, so J̃ = J/scale stays of
    moderate size however confident the network is: H shrinks with the square of the
    loss and would leave the range of float32 at a loss of 1e-20. ``scale`` holds the
    factor in float64; H = scale² H̃, and (scale/‖g‖)² times H̃'s downdate is the
    Hessian of the cosine distance.

    Args:
        gradients: the gradient map.
        x: network inputs, ``(batch, ...)``.
        y: labels, ``(batch,)``.
        input_scale: d(input)/d(pixel) of each input element, ``(d_x,)``, normally
            1/std of the normalisation; makes J a derivative with respect to pixels.
            Default 1: with respect to network inputs.

    Attributes:
        unit_gradient: ĝ = g/‖g‖, ``(batch, d_θ)``, zero where g vanishes.
        norm: ‖g‖, ``(batch,)``, float64.
        scale: J/J̃, ``(batch,)``, float64: the power of two nearest to ‖g‖, or 1 where
            g vanishes or is not finite.

    Raises:
        ValueError: if inputs and labels don't match, or ``input_scale`` has another
            shape than ``(d_x,)``.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(3, 2)
        >>> x, y = torch.rand(4, 3), torch.tensor([0, 1, 1, 0])
        >>> jacobian = GradientJacobian(GradientMap(net, dtype=torch.float64), x, y)
        >>> v = torch.rand(4, 3, dtype=torch.float64)
        >>> u = torch.rand(4, 8, dtype=torch.float64)
        >>> left = (u * jacobian.matvec(v)).sum(1)
        >>> torch.testing.assert_close(left, (jacobian.rmatvec(u) * v).sum(1))
    """

    def __init__(
        self,
        gradients: GradientMap,
        x: Float[Tensor, "batch ..."],
        y: Shaped[Tensor, "batch ..."],
        *,
        input_scale: Float[Tensor, " d_x"] | None = None,
    ) -> None:
        check_samples(x, y)
        self.gradients = gradients
        self.x = x.detach()
        self.y = y.detach().to(x.device)
        d_x = self.x[0].numel()
        if input_scale is None:
            input_scale = torch.ones(d_x)
        if input_scale.shape != (d_x,):
            raise ValueError(
                f"input_scale must have one entry per input element, ({d_x},), got "
                f"{tuple(input_scale.shape)}."
            )
        self.input_scale = input_scale.to(x.device, gradients.dtype)
        first = gradients(x, y)
        norm = torch.linalg.vector_norm(first, dim=1, dtype=torch.float64)
        usable = torch.isfinite(norm) & (norm > 0)
        # A power of two: dividing by it rounds nothing, and the rounding of ‖g‖, which
        # varies with the rest of the batch, does not reach the scores.
        nearest = torch.exp2(norm.clamp_min(_SMALLEST_NORM).log2().round())
        self.scale = torch.where(usable, nearest, torch.ones_like(norm))
        self._weight = 1 / self.scale
        self._workspace = Workspace((self.x, self.y, self._weight))
        weight = self._weight.to(first.dtype)
        if bool(((norm >= _SMALL) & (norm <= 1 / _SMALL) | (norm == 0)).all()):
            # A power of two goes through a backward pass without a trace.
            unit = first.mul_(weight[:, None])
        else:
            unit = gradients(x, y, self._weight)
        length = torch.linalg.vector_norm(unit, dim=1, dtype=torch.float64)
        self.norm = length * self.scale
        divisor = torch.where(length > 0, length, torch.ones_like(length))
        self.unit_gradient = unit / divisor.to(unit.dtype)[:, None]
        self._products = BatchProducts(
            gradients, self.x, self.y, self._weight, self.unit_gradient, length
        )

    @cached_property
    def doubts(self) -> tuple[Status, ...]:
        """What results about each sample are worth at most; ``ok``: all that they say.

        Each sample's derivatives are compared with a finite difference. A zero is a
        claim: where the gradient is zero, or its derivative is although steps from the
        size of a pixel level to half of the range change it, nothing can be said. In
        float32 a zero may be an underflow.
        """
        at, products = self.gradients, self._products
        flat, hidden = ~products.moving, {}
        left = (flat | ~products.shown if at.sharp else flat).nonzero()[:, 0]
        if len(left):
            at = at.in_dtype(torch.float64) if at.sharp else at
            x, y, weight = self.x[left], self.y[left], self._weight[left]
            v = normal(x, self.input_scale.shape).to(at.dtype).expand(len(x), -1)
            there = at.jvp(x, y, v, weight)
            flat[left] &= (there == 0).all(1)
            if at.sharp:
                hidden = self._hidden(left[~at.shows_all(x, y, v, there, weight)])
        return tuple(
            self._doubt_of_zero(i, bool(flat[i]))
            if flat[i] or self.norm[i] == 0
            else hidden.get(i, self.gradients.doubt)
            for i in range(len(self.x))
        )

    def _hidden(self, rows: Shaped[Tensor, " rows"]) -> dict[int, Status]:
        """What is known of samples whose derivatives may miss something.

        The network was examined on two samples, maybe long ago: others may take another
        way through it, and a training can change more in it than its weights.
        """
        if not len(rows):
            return {}
        # A sample may be at kinks, as with a blank background; one next to it is not.
        x = self.x[rows].double()
        size = scales(x).view(-1, *[1] * (x.ndim - 1))
        x = x + 0.01 * size * normal(x, x.shape, seed=1)
        y, weight = self.y[rows], self._weight[rows]
        at = self.gradients.in_dtype(torch.float64)
        v = normal(x, self.input_scale.shape).expand(len(x), -1)
        shown = at.shows_all(x, y, v, at.jvp(x, y, v, weight), weight).tolist()
        found = {
            i: at.hidden_dependence(x[j], y[j], weight[j])
            for j, i in enumerate(rows.tolist())
            if not shown[j]
        }
        for status in found.values():
            if status != OK:
                self.gradients.note(status.reason)
        return found

    def _doubt_of_zero(self, sample: int, flat: bool) -> Status:
        x, y = self.x[sample : sample + 1], self.y[sample : sample + 1]
        if float(self.norm[sample]) == 0:
            norm = self._norm_in_float64(x, y)
            if 0 < norm < torch.finfo(torch.float32).tiny:
                return Status(
                    "unresolved",
                    f"the gradient underflows float32, and has a norm of {norm:.0e}; "
                    "compute in float64 (argument dtype)",
                )
            if not flat:  # a perfect fit, next to which there is none
                return self.gradients.doubt
            return Status(
                "undefined",
                "the gradient of this sample is zero: its units are dead or saturated, "
                "its loss is zero, or a wrapper puts gradients elsewhere",
            )
        weight = self._weight[sample : sample + 1]
        here = self.gradients(x, y, weight).detach()
        size = float(here.norm())
        span = float(x.max() - x.min()) or 1.0
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
        # At random, and all alike: a brighter image can tell where noise averages out.
        both = signs, torch.ones_like(signs)
        ways = [side * way for way in both for side in _SIDES]
        for name, share in _COARSE.items():
            for way in ways:
                step = share * span * way.to(x)
                there = self.gradients(x + step, y, weight).detach()
                moved = float((there - here).norm()) / size
                if moved > _MOVED:
                    return Status(
                        "undefined",
                        f"the gradient's derivative in the input is zero, but moving "
                        f"each input by a {name} changes it by {moved:.0e} of its "
                        f"size: part of the forward is constant to autograd (rounding, "
                        f"quantisation, detach), or off here and on there",
                    )
        return self.gradients.doubt

    def _norm_in_float64(self, x: Tensor, y: Tensor) -> float:
        if self.dtype == torch.float64:
            return 0.0
        try:
            return float(self.gradients.in_dtype(torch.float64)(x, y).detach().norm())
        except Exception:  # there is no float64 here
            return 0.0

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(batch, d_θ, d_x)``."""
        return len(self.x), self.unit_gradient.shape[1], self.input_scale.numel()

    @property
    def dtype(self) -> torch.dtype:
        """Arithmetic of the products."""
        return self.gradients.dtype

    @property
    def device(self) -> torch.device:
        """Where the products are taken."""
        return self.x.device

    @cached_property
    def _lengths(self) -> list[float]:
        """‖g‖ as the products count it."""
        lengths: list[float] = (self.norm / self.scale).tolist()
        return lengths

    @property
    def products(self) -> BatchProducts:
        """What solvers take many products from; its ``way`` says how it forms them."""
        return self._products

    def matvec(self, v: Float[Tensor, "batch d_x"]) -> Float[Tensor, "batch d_theta"]:
        """J v of each sample, ``(batch, d_θ)``; one jvp through a backward pass."""
        check_shape("v", v, (len(self.x), self.input_scale.numel()))
        scaled = v.to(self.dtype) * self.input_scale
        there = self.gradients.jvp(self.x, self.y, scaled, self._weight)
        return there * self.scale.to(self.dtype)[:, None]

    def rmatvec(self, u: Float[Tensor, "batch d_theta"]) -> Float[Tensor, "batch d_x"]:
        """Jᵀ u of each sample, ``(batch, d_x)``; one double backward pass."""
        return self.normalized_rmatvec(u) * self.scale.to(self.dtype)[:, None]

    def normalized_rmatvec(
        self, u: Float[Tensor, "batch d_theta"]
    ) -> Float[Tensor, "batch d_x"]:
        """J̃ᵀ u = Jᵀu/scale, ``(batch, d_x)``."""
        back = self.gradients.vjp(self.x, self.y, u.to(self.dtype), self._weight)
        return back * self.input_scale

    def normalized_pulls(
        self, u: Float[Tensor, "rows d_theta"]
    ) -> Float[Tensor, "batch rows d_x"]:
        """J̃ᵀ u of every sample for each of several u."""
        batch, rows = len(self.x), len(u)
        x, y, weight = (
            t.repeat_interleave(rows, 0) for t in (self.x, self.y, self._weight)
        )
        cotangents = u.to(self.dtype).expand(batch, -1, -1).reshape(batch * rows, -1)
        back = self.gradients.vjp(x, y, cotangents, weight) * self.input_scale
        return back.view(batch, rows, -1)

    def normal(self, *, cosine: bool = False) -> NormalOperator:
        """H̃ = J̃ᵀJ̃ as an operator for the spectrum solvers.

        Args:
            cosine: the Hessian of the cosine distance instead, H̃ − (J̃ᵀĝ)(J̃ᵀĝ)ᵀ
                (LAVP, Theorem 4).
        """
        along = None
        if cosine:
            along = self._products.pull(self.unit_gradient) * self.input_scale
        return NormalOperator(self, along)

    def gram(
        self,
        sample: int,
        *,
        max_memory: float | None = None,
        by_layer: bool = False,
        directions: Float[Tensor, "k d_x"] | None = None,
    ) -> Gram:
        """H̃ of one sample as a dense float64 matrix, and J̃ᵀĝ.

        Args:
            sample: position in the batch.
            max_memory: MiB that may be kept of J̃ at a time; default: all that it takes.
            by_layer: also find λ_1 of what each module adds to H̃.
            directions: V, as rows, for V H̃ Vᵀ and V J̃ᵀĝ in place of H̃ and J̃ᵀĝ.

        Returns:
            H̃ ``(d_x, d_x)`` (multiply by ``scale[sample]**2`` for H), J̃ᵀĝ ``(d_x,)``,
            and what each module adds to the trace of H̃.
        """
        return gram(
            self.gradients,
            self.x[sample],
            self.y[sample],
            weight=self._weight[sample],
            input_scale=self.input_scale,
            norm=self._lengths[sample],
            position=sample,
            workspace=self._workspace,
            max_memory=max_memory,
            by_layer=by_layer,
            directions=directions,
        )

    def grams(
        self,
        rows: Sequence[int],
        directions: Float[Tensor, "rows k d_x"],
        *,
        max_memory: float | None = None,
    ) -> list[Gram]:
        """:meth:`gram` of several samples along a few directions each.

        Args:
            rows: positions of the samples.
            directions: of each.
            max_memory: MiB for tangents.
        """
        found = None
        chosen, rest = list(rows), directions
        first: list[Gram] = []
        if chosen and not self._workspace.trusted:
            # What is found out about the first one holds for the network.
            first = [
                self.gram(chosen[0], max_memory=max_memory, directions=directions[0])
            ]
            chosen, rest = chosen[1:], directions[1:]
        if chosen:
            try:
                found = grams(
                    self.gradients,
                    self.x[chosen],
                    self.y[chosen],
                    rest,
                    weights=self._weight[chosen],
                    input_scale=self.input_scale,
                    norms=[self._lengths[i] for i in chosen],
                    workspace=self._workspace,
                    positions=chosen,
                    max_memory=max_memory,
                )
            except Exception as error:  # one of them may be at fault
                _log.info("leakwatch goes on sample by sample: %s", error)
        if found is None:
            found = [
                self.gram(i, max_memory=max_memory, directions=some)
                for i, some in zip(chosen, rest, strict=True)
            ]
        return first + found

    def at_image(self, sample: int, x: Float[Tensor, "*shape"]) -> GradientJacobian:
        """The same for another image with the label of a sample.

        What was found out about the network is not found out again: that its layers
        come apart, and, where it bends at the sample, that it does.

        Args:
            sample: position in the batch.
            x: the other image, a network input.
        """
        there = GradientJacobian(
            self.gradients,
            x[None],
            self.y[sample : sample + 1],
            input_scale=self.input_scale,
        )
        known = self._workspace.straight
        bends = known is not None and known[sample] is False
        there._workspace = self._workspace.elsewhere(False if bends else None)
        return there

    def dense(self, sample: int) -> Float[Tensor, "d_theta d_x"]:
        """J of one sample as a dense matrix, for small networks and checks."""
        directions = torch.diag(self.input_scale)
        rows = self.gradients.dense(
            self.x[sample], self.y[sample], directions, self._weight[sample]
        )
        return rows.T * self.scale[sample].to(self.dtype)

    def rounding(self, sample: int, directions: int = 3) -> float:
        """:meth:`roundings` of one sample."""
        return float(self.roundings([sample], directions)[0])

    def roundings(
        self, rows: Sequence[int] | None = None, directions: int = 3
    ) -> Float[Tensor, " rows"]:
        """How far rounding has moved J̃ of each sample: an estimate of ‖ΔJ̃‖_F.

        Tangents along a few random directions are formed in float32 and in float64.
        Their difference is the error of float32; float64 loses as many digits of its
        own. Entries of J are usually good to a few units of machine precision, but a
        network that centres or rescales its input loses more, as many digits as the
        input has in common with what is subtracted from it.

        Args:
            rows: positions of the samples; default: all.
            directions: how many directions; the estimate is off by about
                ``1/√(2 · directions)`` of itself, less where many entries err. One
                costs nothing where products have been taken in float32.

        Returns:
            The estimates, float64, infinite where float32 gives no number.

        Raises:
            RuntimeError: whatever the network raises in the other precision.
        """
        if directions == 1 and rows is None:
            seen = self._products.rounding * self.input_scale.abs().amax().double()
            missing = seen.isnan().nonzero()[:, 0].tolist()
            if len(missing) < len(self.x):
                if missing:
                    seen[missing] = self.roundings(missing, 1)
                return seen
        x, y, weight = self.x, self.y, self._weight
        if rows is not None:
            x, y, weight = (t[list(rows)] for t in (x, y, weight))
        squared = self.scale.new_zeros(len(x))
        if not len(x):
            return squared
        n = self.input_scale.numel()
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(directions, n, generator=generator, dtype=torch.float64)
        drawn = drawn / drawn.norm(dim=1, keepdim=True)
        # Rounded samples and directions for both, or their rounding would count.
        x, scale = x.float(), self.input_scale.float()
        for v in drawn.float().to(self.device):
            columns = [
                self.gradients.in_dtype(kind).jvp(
                    x, y, (v.to(kind) * scale.to(kind)).expand(len(x), -1), weight
                )
                for kind in (torch.float32, torch.float64)
            ]
            squared += columns[1].sub_(columns[0]).square_().sum(1)
        error = (n / directions * squared).sqrt().nan_to_num(math.inf, math.inf)
        unit = torch.finfo(self.dtype).eps / torch.finfo(torch.float32).eps
        return error * unit


@final
@dataclass(frozen=True, eq=False)
class NormalOperator:
    """v ↦ J̃ᵀJ̃v for a batch, with the cosine distance's downdate when asked.

    Satisfies :class:`leakwatch.spectrum.SymmetricOperator`, and with the two halves
    `forward` and `backward` :class:`leakwatch.spectrum.FactorOperator`: for the cosine
    distance the factor is (I − ĝĝᵀ)J̃.

    Attributes:
        jacobian: the Jacobian.
        along: J̃ᵀĝ, ``(batch, d_x)``, for the cosine distance; ``None`` for L2.
    """

    jacobian: GradientJacobian
    along: Float[Tensor, "batch d_x"] | None = None
    _mask: _Mask = field(default_factory=lambda: _Mask(), init=False, repr=False)

    @property
    def batch_size(self) -> int:
        """Number of samples."""
        return self.jacobian.shape[0]

    @property
    def size(self) -> int:
        """d_x."""
        return self.jacobian.shape[2]

    @property
    def rows(self) -> int:
        """d_θ, the rows of the factor."""
        return self.jacobian.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Arithmetic of the products."""
        return self.jacobian.dtype

    @property
    def device(self) -> torch.device:
        """Where the products are taken."""
        return self.jacobian.device

    def matvec(
        self,
        v: Float[Tensor, "batch n"],
        active: Bool[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch n"]:
        """H̃ v; rows where ``active`` is False are skipped and come back as zeros."""
        check_shape("v", v, (self.batch_size, self.size))
        j = self.jacobian

        def product(part: Tensor, rows: Tensor | None) -> Tensor:
            out = j.products.normal(part.to(j.dtype) * j.input_scale, rows)
            out = out * j.input_scale
            if self.along is not None:
                t = self.along if rows is None else self.along[rows]
                out = out - t * (t * part.to(t.dtype)).sum(1, keepdim=True)
            return out

        return self._where_active(product, v, active, self.size)

    def forward(
        self,
        v: Float[Tensor, "batch n"],
        active: Bool[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch rows"]:
        """J̃ v, without its part along ĝ for the cosine distance."""
        check_shape("v", v, (self.batch_size, self.size))
        j = self.jacobian

        def product(part: Tensor, rows: Tensor | None) -> Tensor:
            scaled = part.to(j.dtype) * j.input_scale
            return self._across(j.products.push(scaled, rows), rows)

        return self._where_active(product, v, active, self.rows)

    def backward(
        self,
        u: Float[Tensor, "batch rows"],
        active: Bool[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch n"]:
        """J̃ᵀ u, of the part of u across ĝ for the cosine distance."""
        check_shape("u", u, (self.batch_size, self.rows))
        j = self.jacobian

        def product(part: Tensor, rows: Tensor | None) -> Tensor:
            across = self._across(part, rows).to(j.dtype)
            return j.products.pull(across, rows) * j.input_scale

        return self._where_active(product, u, active, self.size)

    def _across(self, u: Tensor, rows: Tensor | None) -> Tensor:
        if self.along is None:
            return u
        unit = self.jacobian.unit_gradient
        unit = unit if rows is None else unit[rows]
        return u - unit * (unit * u.to(unit.dtype)).sum(1, keepdim=True)

    def _where_active(
        self,
        product: Callable[[Tensor, Tensor | None], Tensor],
        v: Float[Tensor, "batch columns"],
        active: Bool[Tensor, " batch"] | None,
        width: int,
    ) -> Float[Tensor, "batch width"]:
        """A product of the active rows; the others are skipped, and come as zeros."""
        if active is None:
            return product(v, None)
        rows = self._mask.rows(active)
        if len(rows) == len(v):
            return product(v, None)
        if len(rows) == 0:
            return v.new_zeros(len(v), width)
        if self.jacobian.products.comes_whole(len(rows)):
            return product(v, None).masked_fill_(~active[:, None], 0.0)
        out = product(v[rows], rows)
        return out.new_zeros(len(v), width).index_copy(0, rows, out)


class _Mask:
    """Positions of a mask, looked at again only when it is another one.

    To look at what lies on a GPU means to wait for it.
    """

    def __init__(self) -> None:
        self._mask: Tensor | None = None
        self._version = -1
        self._rows: Tensor = torch.zeros(0, dtype=torch.int64)

    def rows(self, mask: Bool[Tensor, " batch"]) -> Shaped[Tensor, " rows"]:
        """Where it is true."""
        if mask is not self._mask or mask._version != self._version:
            self._mask, self._version = mask, mask._version
            self._rows = mask.nonzero()[:, 0]
        return self._rows
