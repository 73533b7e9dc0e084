"""H = JᵀJ of one sample in float64, without forming J where a layer allows it.

Forward-mode tangents along every input direction give J column by column. The gradient
of a linear layer or a convolution is a product G = δᵀa of what comes back to it and of
what goes in, so its tangent Ġ = Δᵀa + δᵀA is known from the tangents Δ, A of the two.
Coordinates of Ġ that have the same inner products are often far fewer than its entries
(:mod:`leakwatch.derivatives.gram.forms`): for a linear layer that sees one vector C + P
instead of C·P, so 4.8 thousand instead of 1.8 million for an MLP with two hidden layers
of 1,000.

Where the network is locally piecewise linear (ReLU, max-pool, normalisation with fixed
statistics), Δ of every layer is a constant matrix times the tangent of δ at the last
one, so a few backward passes replace a backward tangent in each direction. What is
left are forward tangents A, and no layer has more than its inputs' dimension.

Parameters that don't come apart are differentiated directly, and only they.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from leakwatch.derivatives.gradient_map import GradientMap
from leakwatch.derivatives.gram.assembly import Source, assemble
from leakwatch.derivatives.gram.conv_factors import Workspace
from leakwatch.derivatives.gram.sources import (
    LayersApart,
    Sample,
    WholeJacobian,
    all_straight,
    disagreeing,
    found_together,
    opened,
    random_direction,
    stored,
)
from leakwatch.derivatives.layers.taps import Layer, listen
from leakwatch.derivatives.runtime import Weights
from leakwatch.derivatives.verification.agreement import agreement

__all__ = ["Gram", "Workspace", "columns_stored", "gram", "grams"]

# Samples whose tangents are formed together: how many at least, memory for them, and
# how many copies of them there are at once.
_FEWEST_TOGETHER = 2
_TOGETHER_BYTES = 512 * 2**20
_COPIES = 6

_WHOLE = (
    "the whole Jacobian is formed, because the layers can't be taken apart; a weight "
    "may be read outside of its layer"
)


@final
@dataclass(frozen=True)
class Gram:
    """H of one sample and the projection of its columns on the gradient.

    Attributes:
        h: JᵀJ, ``(d_x, d_x)``, float64.
        along: Jᵀĝ with ĝ = g/‖g‖, ``(d_x,)``, float64; the Hessian of the cosine
            distance is ``(h - along alongᵀ)/‖g‖²`` (LAVP, Theorem 4). Zero when the
            gradient vanishes.
        norm: ‖g‖, with the weight of the loss.
        traces: name of a module, empty for the network itself → trace of H_l = J_lᵀJ_l
            of its own parameters; these add up to the trace of H.
        largest: the same with λ_1 of H_l; empty unless asked for.
    """

    h: Float[Tensor, "d_x d_x"]
    along: Float[Tensor, " d_x"]
    norm: float
    traces: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)


def gram(
    gradients: GradientMap,
    x: Float[Tensor, "*shape"],
    y: Shaped[Tensor, "*target"],
    *,
    weight: Float[Tensor, ""] | None = None,
    input_scale: Float[Tensor, " d_x"] | None = None,
    norm: float | None = None,
    workspace: Workspace | None = None,
    max_memory: float | None = None,
    by_layer: bool = False,
    position: int | None = None,
    directions: Float[Tensor, "k d_x"] | None = None,
) -> Gram:
    """H = JᵀJ of one sample: tangents in ``gradients.dtype``, products in float64.

    Args:
        gradients: the gradient map.
        x: one network input, without a batch dimension.
        y: its label.
        weight: factor on the loss, and so on J. Default 1.
        input_scale: d(input)/d(pixel) of each input element; turns J into a derivative
            with respect to pixels. Default 1.
        norm: ‖g‖ with the weight, where it is known; a check of the result.
        workspace: memory to use again over several samples of one network. The first
            sample is compared with plain derivatives, the others by ``norm`` only.
        max_memory: MiB for J, or what stands for it, and for the tangents that it is
            formed from; some 100 MiB and a few matrices like H come on top. Where that
            is not enough for all layers, tangents are formed again for each part of
            them. Default: all that it takes; when memory runs out, half of it.
            Results don't depend on it beyond rounding.
        by_layer: also find λ_1 of each module's part.
        position: of the sample in the batch of the workspace; what can be found out
            about all of them together is then found out once.
        directions: V, as rows: JᵀJ along them, V H Vᵀ, in place of H, V Jᵀĝ in place
            of Jᵀĝ, and traces of these. Default: along each input element.

    Returns:
        H, Jᵀĝ and ‖g‖, and the trace of each module's part.

    Raises:
        RuntimeError: whatever the network raises; out of memory only if very little of
            J at a time is still too much.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(3, 2)
        >>> at = GradientMap(net, dtype=torch.float64)
        >>> x, y = torch.rand(3), torch.tensor(1)
        >>> columns = at.dense(x, y, torch.eye(3))
        >>> torch.testing.assert_close(gram(at, x, y).h, columns @ columns.T)
    """
    n = x.numel()
    space = Workspace() if workspace is None else workspace
    scale = torch.ones(n) if input_scale is None else input_scale
    scale = scale.to(x.device, gradients.dtype)
    along = torch.diag(scale) if directions is None else directions.to(scale) * scale
    along = along.view(-1, *x.shape)
    limit = None if max_memory is None else int(max_memory * 2**20)
    with gradients.evaluation(x) as at:
        xs, ys = gradients.prepared(x[None], y[None])
        wi = xs.new_ones(()) if weight is None else weight.to(xs)
        sample = Sample(gradients, at, xs[0], ys[0], wi)
        job = _Job(sample, along, space, limit, by_layer, position)
        if _comes_apart(gradients, at, xs, ys):
            result = job.apart(norm)
            if result is not None:
                return result
        return job.result(WholeJacobian(sample))


def grams(
    gradients: GradientMap,
    x: Float[Tensor, "batch ..."],
    y: Shaped[Tensor, "batch ..."],
    directions: Float[Tensor, "batch k d_x"],
    *,
    weights: Float[Tensor, " batch"],
    input_scale: Float[Tensor, " d_x"],
    norms: Sequence[float],
    workspace: Workspace,
    positions: Sequence[int],
    max_memory: float | None = None,
) -> list[Gram] | None:
    """:func:`gram` of several samples along a few directions each, at once.

    Calls cost more than numbers there: tangents of all samples are formed together.

    Args:
        gradients: the gradient map.
        x: samples.
        y: their labels.
        directions: of each.
        weights: factors on their losses.
        input_scale: as for :func:`gram`, like all that follow, of each.
        norms: ‖g‖.
        workspace: memory, of a network whose first sample has been compared.
        positions: of the samples in the batch of the workspace.
        max_memory: MiB for tangents.

    Returns:
        Of each sample; ``None`` where they have to be taken one by one.
    """
    if not workspace.trusted or len(x) < _FEWEST_TOGETHER:
        return None
    limit = None if max_memory is None else int(max_memory * 2**20)
    k = directions.shape[1]
    scaled = (directions.to(input_scale) * input_scale).view(len(x), k, *x.shape[1:])
    with gradients.evaluation(x) as at:
        xs, ys = gradients.prepared(x, y)
        if not _comes_apart(gradients, at, xs[:1], ys[:1]):
            return None
        layers, last = listen(gradients, at, xs[0], ys[0])
        if not layers:
            return None
        samples = Sample(gradients, at, xs, ys, weights.to(xs))
        alone = [samples.at_position(i) for i in range(len(xs))]
        jobs = [
            _Job(one, some, workspace, limit, by_layer=False, position=i)
            for one, some, i in zip(alone, scaled, positions, strict=True)
        ]
        straight = [job.straight(layers, last) for job in jobs]
        if None in straight or len(set(straight)) > 1:
            return None
        taps, rank = opened(alone[0], layers, last, straight[0])
        numbers = sum(
            call.input.numel() + call.output.numel()
            for layer in taps.layers.values()
            for call in layer.calls
        )
        room = _TOGETHER_BYTES if limit is None else min(limit // 3, _TOGETHER_BYTES)
        group = room // (_COPIES * numbers * k * xs.itemsize)
        if group < _FEWEST_TOGETHER:
            return None
        out: list[Gram] = []
        for start in range(0, len(xs), group):
            part = slice(start, start + group)
            found = found_together(
                Sample(gradients, at, xs[part].clone(), ys[part], samples.weight[part]),
                taps.layers,
                last,
                rank,
                scaled[part],
            )
            for one, job, known, norm in zip(
                alone[part], jobs[part], found, norms[part], strict=True
            ):
                own = one.taps(taps.layers, last)
                result = job.result(LayersApart(one, own, rank, k, known))
                if not _same_norm(result, norm):
                    return None
                out.append(result)
    return out


def columns_stored(
    gradients: GradientMap, x: Float[Tensor, "*shape"], y: Shaped[Tensor, "*target"]
) -> int:
    """How many numbers :func:`gram` keeps for each input direction, at most.

    Args:
        gradients: the gradient map.
        x: one network input, without a batch dimension.
        y: its label.

    Returns:
        d_θ where J is formed as it is; less where layers are taken apart.
    """
    with gradients.evaluation(x) as at:
        xs, ys = gradients.prepared(x[None], y[None])
        if not _comes_apart(gradients, at, xs, ys):
            return at.size
        sample = Sample(gradients, at, xs[0], ys[0], xs.new_ones(()))
        return stored(sample, *listen(gradients, at, xs[0], ys[0]))


@dataclass(frozen=True, eq=False)
class _Job:
    """What :func:`gram` was asked for."""

    sample: Sample
    directions: Tensor
    space: Workspace
    limit: int | None
    by_layer: bool
    position: int | None = None

    def apart(self, norm: float | None) -> Gram | None:
        """The result layer by layer, or ``None`` if that can't be trusted."""
        it = self.sample
        layers, last = listen(it.gradients, it.at, it.x, it.y)
        if not layers:
            return None
        straight = self.straight(layers, last)
        taps, rank = opened(it, layers, last, straight)
        v = random_direction(it, len(self.directions))
        rows = self.directions.reshape(len(self.directions), -1)
        along = (rows.T @ v).view_as(it.x)
        plain = None
        if not self.space.trusted:
            plain = taps.plain(along)
            wrong = disagreeing(taps, rank, along, *plain)
            if wrong:
                it.gradients.formed.update(wrong)
                taps, rank = opened(it, layers, last, straight)
        result = self.result(LayersApart(it, taps, rank, len(self.directions)))
        if plain is None and _same_norm(result, norm):
            return result
        g, column = taps.plain(along) if plain is None else plain
        if _agrees(result, _flat(g), v, _flat(column)):
            # A gradient that is zero or not finite shows nothing.
            self.space.trusted = math.isfinite(result.norm) and result.norm > 0
            return result
        it.gradients.note(_WHOLE)
        return None

    def straight(self, layers: dict[str, Layer], last: str) -> bool | None:
        batch, at = self.space.batch, self.sample
        if self.position is None or (batch is None and self.space.straight is None):
            return None
        if self.space.straight is None:
            assert batch is not None
            x, y, weight = batch
            try:
                xs, ys = at.gradients.prepared(x, y)
                self.space.straight = all_straight(
                    at.gradients, at.at, xs, ys, weight.to(xs), layers, last
                )
            except Exception:  # what is wrong with one shows when its turn comes
                self.space.straight = [None] * len(x)
        return self.space.straight[self.position]

    def result(self, source: Source) -> Gram:
        """H and what goes with it from all parts of a source."""
        sums = assemble(
            source,
            self.directions,
            self.space,
            limit=self.limit,
            largest=self.by_layer,
        )
        # One look at all that is read as numbers.
        squared, *traces = torch.stack([sums.squared, *sums.traces.values()]).tolist()
        norm = math.sqrt(squared) if squared >= 0 else math.nan
        along = sums.along / norm if norm > 0 else sums.along
        by_name = dict(zip(sums.traces, traces, strict=True))
        return Gram(sums.h, along, norm, _named(by_name), _named(sums.largest))


def _comes_apart(gradients: GradientMap, at: Weights, x: Tensor, y: Tensor) -> bool:
    batched = gradients.resolve(at, x, y) == "vmap" and gradients.forward_mode
    return batched and _WHOLE not in gradients.notes


def _named(numbers: dict[str, float]) -> dict[str, float]:
    """By the names that modules have inside of the network."""
    return {k.removeprefix("module").removeprefix("."): v for k, v in numbers.items()}


def _flat(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts.values()])


def _agrees(result: Gram, g: Tensor, v: Tensor, column: Tensor) -> bool:
    """‖g‖, ‖J v‖ and ĝᵀJ v as autograd alone gives them, no layer taken apart."""
    g, v, column = g.double(), v.double(), column.double()
    norm, image = g.norm(), column.norm()
    if not bool(torch.isfinite(norm)):
        return True
    along = torch.where(norm > 0, g @ column / norm, 0.0)
    formed = torch.stack(((v @ result.h @ v).clamp_min(0).sqrt(), result.along @ v))
    size = torch.maximum(formed[0], image).expand(2)
    return (
        _same_norm(result, float(norm))
        and bool(torch.isfinite(image))
        and agreement(
            formed, torch.stack((image, along)), "layer's factors", size=size
        ).holds
    )


def _same_norm(result: Gram, norm: float | None) -> bool:
    if norm is None:
        return True
    ours, plain = (torch.tensor([n]).double() for n in (result.norm, norm))
    compared = agreement(ours, plain, "layer's factors")
    return compared.holds and compared.conclusive
