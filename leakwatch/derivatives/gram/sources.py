"""Where tangents for H = JᵀJ come from: layers taken apart, or columns of J."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.func import vmap

from leakwatch.derivatives.gradient_map import GradientMap
from leakwatch.derivatives.gram.conv_factors import ConvFactors
from leakwatch.derivatives.gram.forms import Plain, Rows, choose, in_form, width_of
from leakwatch.derivatives.gram.tangents import Parts, Taps, basis
from leakwatch.derivatives.layers.taps import Layer
from leakwatch.derivatives.runtime import Weights
from leakwatch.derivatives.runtime.chunking import in_chunks
from leakwatch.derivatives.verification.agreement import agreement

# Known Δ pay while there are at most this part of the directions.
_FEW = 8
# Directions of which tangents are known are taken all at once.
_ALL = 2**40
# A layer counts as wrong only by an error that is visible in the whole column, too.
_VISIBLE = 1e-3


@final
@dataclass(frozen=True, eq=False)
class Sample:
    """One sample inside an evaluation.

    Attributes:
        gradients: the gradient map.
        at: its weights.
        x: the sample, without a batch dimension.
        y: its label.
        weight: factor on the loss.
    """

    gradients: GradientMap
    at: Weights
    x: Tensor
    y: Tensor
    weight: Tensor

    @property
    def size(self) -> int:
        """d_x."""
        return self.x.numel()

    def at_position(self, i: int) -> Sample:
        """One of several samples."""
        # In memory of its own: each tangent takes as much as there is behind it.
        x = self.x[i].clone()
        return Sample(self.gradients, self.at, x, self.y[i], self.weight[i])

    def taps(self, layers: dict[str, Layer], last: str) -> Taps:
        """The network opened at some layers."""
        return Taps(self.gradients, self.at, self.x, self.y, self.weight, layers, last)


@final
@dataclass(frozen=True, eq=False)
class Found:
    """What is known of one sample's layers along all of its directions.

    Attributes:
        here: δ, a and the other gradients.
        tangents: of all of them; of δ that at the last call alone, where few Δ span
            the others.
        basis: what each of these becomes at every call; ``None`` where there are none.
    """

    here: Parts
    tangents: Parts
    basis: dict[str, Tensor] | None


def found_together(
    samples: Sample,
    layers: dict[str, Layer],
    last: str,
    rank: int | None,
    directions: Tensor,
) -> list[Found]:
    """What is known of several samples, formed at once.

    Args:
        samples: with a batch dimension.
        layers: those that come apart, the same for all.
        last: key of the last call.
        rank: how many known Δ span all of them, or ``None``.
        directions: ``(samples, k, *shape of x)``.
    """
    x = samples.x
    keys = frozenset(key for layer in layers.values() for key in layer.keys)

    def one(xi: Tensor, yi: Tensor, wi: Tensor, some: Tensor) -> tuple[Any, ...]:
        taps = Taps(samples.gradients, samples.at, xi, yi, wi, layers, last)
        here = taps.here()
        if rank is None:
            moved = taps.everything(some, keys, frozenset(taps.others))
            back: dict[str, Tensor] = {}
        else:
            moved = taps.forwards(some, keys)
            rows = torch.eye(rank, dtype=x.dtype, device=x.device)
            back = taps.backwards(rows.view(rank, *here.deltas[last].shape))
        first, second = (
            (parts.deltas, parts.inputs, parts.others) for parts in (here, moved)
        )
        return first, second, back

    here, moved, back = vmap(one)(x, samples.y, samples.weight, directions)

    def at(parts: tuple[dict[str, Tensor], ...], i: int) -> Parts:
        return Parts(*({k: t[i] for k, t in some.items()} for some in parts))

    return [
        Found(at(here, i), at(moved, i), {k: t[i] for k, t in back.items()} or None)
        for i in range(len(x))
    ]


@final
class LayersApart:
    """Layers taken apart.

    Args:
        sample: the sample.
        taps: the network opened at the layers.
        rank: how many known Δ span all of them, or ``None``.
        count: of the directions; default: as many as the input has elements.
        found: what is known of the sample along all of them, if it is.

    Attributes:
        parts: all layers and other parameters.
    """

    def __init__(
        self,
        sample: Sample,
        taps: Taps,
        rank: int | None,
        count: int | None = None,
        found: Found | None = None,
    ) -> None:
        self._taps, self._rank, self._found = taps, rank, found
        n = sample.size if count is None else count
        x = sample.x
        here = taps.here() if found is None else found.here
        deltas = None if found is None else found.basis
        if rank is not None and deltas is None:
            shape = here.deltas[taps.last].shape
            rows = torch.eye(rank, dtype=x.dtype, device=x.device).view(rank, *shape)
            deltas = basis(taps, rows, taps.chunk(frozenset(), outputs=True))
        self.parts: Sequence[Rows | ConvFactors] = [
            *(Rows(k, None, here.others[k].flatten()) for k in taps.others),
            *(
                in_form(layer, choose(layer, n, rank), here, deltas)
                for layer in taps.layers.values()
            ),
        ]

    def tangents(
        self, directions: Tensor, keys: frozenset[str], names: frozenset[str]
    ) -> tuple[Parts, Tensor | None]:
        """Tangents along k directions, and how Δ is combined from known ones."""
        if self._found is not None:
            known = self._found.tangents
            if self._rank is None:
                return known, None
            return known, known.deltas[self._taps.last].flatten(1)
        if self._rank is None:
            return self._taps.everything(directions, keys, names), None
        tangents = self._taps.forwards(directions, keys)
        return tangents, tangents.deltas[self._taps.last].flatten(1)

    def chunk(self, keys: frozenset[str], names: frozenset[str]) -> int:
        """How many directions at once."""
        if self._found is not None:
            return _ALL
        return self._taps.chunk(keys, outputs=self._rank is None)


@final
class WholeJacobian:
    """Columns of J themselves.

    Args:
        sample: the sample.

    Attributes:
        parts: all parameters.
    """

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        shared = sample.at.shared
        self._sizes = {name: p.numel() for name, p in shared.items()}
        g = sample.gradients(sample.x[None], sample.y[None], sample.weight[None])[0]
        self.parts: Sequence[Rows | ConvFactors] = [
            Rows(name, None, part)
            for name, part in zip(
                shared, torch.split(g, list(self._sizes.values())), strict=True
            )
        ]

    def tangents(
        self, directions: Tensor, keys: frozenset[str], names: frozenset[str]
    ) -> tuple[Parts, Tensor | None]:
        """Tangents along k directions."""
        it = self._sample
        rows = it.gradients.dense(
            it.x, it.y, directions.view(len(directions), -1), it.weight
        )
        split = torch.split(rows, list(self._sizes.values()), 1)
        return Parts(others=dict(zip(self._sizes, split, strict=True))), None

    def chunk(self, keys: frozenset[str], names: frozenset[str]) -> int:
        """How many directions at once."""
        return self._sample.gradients.chunk(self._sample.at)


def opened(
    sample: Sample, layers: dict[str, Layer], last: str, straight: bool | None = None
) -> tuple[Taps, int | None]:
    """The network opened at its layers, and how many known Δ span all of them.

    Args:
        sample: the sample.
        layers: those that come apart.
        last: key of the last call.
        straight: what :func:`all_straight` says of it; found out by default.
    """
    apart, rank = _few_deltas(sample, layers, last)
    if rank is not None:
        if straight is None:
            x, y, weight = sample.x[None], sample.y[None], sample.weight[None]
            straight = all_straight(
                sample.gradients, sample.at, x, y, weight, layers, last
            )[0]
        if straight:
            return sample.taps(apart, last), rank
    # The elementwise weights of normalisations are few: as they are, they take least.
    large = {k: v for k, v in apart.items() if not v.calls[0].elementwise}
    return sample.taps(large, last), None


def all_straight(
    gradients: GradientMap,
    at: Weights,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    layers: dict[str, Layer],
    last: str,
) -> list[bool]:
    """Whether known Δ span all of them, of each of several samples.

    Where the network is piecewise linear around a sample, and all that comes back to
    any call has come through the last one.

    Args:
        gradients: the gradient map, inside its evaluation.
        at: its weights.
        x: samples.
        y: their labels.
        weight: factors on their losses.
        layers: those that come apart, the same for all samples.
        last: key of the last call.
    """
    first = Sample(gradients, at, x[0], y[0], weight[0])
    apart, rank = _few_deltas(first, layers, last)
    if rank is None or first.taps(apart, last).others:
        return [False] * len(x)
    v = random_direction(first)
    shape = apart[last.split("#")[0]].calls[-1].output
    towards = _normal(shape, 1, x)

    def one(xi: Tensor, yi: Tensor, wi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        taps = Taps(gradients, at, xi, yi, wi, apart, last)
        deltas = taps.here().deltas
        back = taps.backwards(deltas[last][None])
        through, direct = (
            torch.cat([parts[key].flatten() for key in deltas])
            for parts in (back, deltas)
        )
        return taps.bends(v, towards), through, direct

    found: list[bool] = []

    def some(xs: Tensor, ys: Tensor, ws: Tensor) -> Tensor:
        bends, through, direct = vmap(one)(xs, ys, ws)
        flags: list[bool] = (~bends).tolist()
        if any(flags) and not agreement(through, direct, "layer's factors").holds:
            pairs = zip(through, direct, flags, strict=True)
            flags = [
                flag and agreement(a[None], b[None], "layer's factors").holds
                for a, b, flag in pairs
            ]
        found.extend(flags)
        return xs

    keys = frozenset(key for layer in apart.values() for key in layer.keys)
    chunk = first.taps(apart, last).chunk(keys, outputs=True)
    in_chunks(some, (x, y, weight), chunk)
    return found


def _few_deltas(
    sample: Sample, layers: dict[str, Layer], last: str
) -> tuple[dict[str, Layer], int | None]:
    """Layers that come apart, and how many numbers δ at the last call has.

    ``None`` where these are too many to pay, or other layers do not come apart.
    """
    formed = sample.gradients.formed
    apart = {k: v for k, v in layers.items() if k not in formed}
    end = apart.get(last.split("#")[0])
    if end is None or apart.keys() != layers.keys():
        return apart, None
    rank = end.calls[-1].output.numel()
    return apart, rank if rank * _FEW <= sample.size else None


def stored(sample: Sample, layers: dict[str, Layer], last: str) -> int:
    """At most how many numbers are kept for each direction."""
    taps, rank = opened(sample, layers, last)
    total = sum(p.numel() for p in taps.others.values())
    for layer in taps.layers.values():
        total += width_of(layer, choose(layer, sample.size, rank), rank)
    return total


def random_direction(sample: Sample, size: int | None = None) -> Tensor:
    """Shaped like the sample, or of a given length; always the same.

    Not a constant one, to which a network that centres its input is blind.
    """
    return _normal(sample.x.shape if size is None else (size,), 0, sample.x)


def _normal(shape: tuple[int, ...], seed: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)


def disagreeing(
    taps: Taps,
    rank: int | None,
    v: Tensor,
    g: dict[str, Tensor],
    column: dict[str, Tensor],
) -> set[str]:
    """Weights of layers whose factors don't give what autograd alone gives.

    Args:
        taps: the opened network.
        rank: how many known Δ span all of them, or ``None``.
        v: a direction, shaped like the sample.
        g: the gradient by parameter.
        column: its tangent along v.
    """
    if not taps.layers:
        return set()
    here = taps.here()
    keys = frozenset(key for layer in taps.layers.values() for key in layer.keys)
    if rank is None:
        moved = taps.everything(v[None], keys, frozenset())
    else:
        ahead = taps.forwards(v[None], keys)
        moved = Parts(taps.backwards(ahead.deltas[taps.last]), ahead.inputs)
    out: set[str] = set()
    sizes = [_norm(list(parts.values())) for parts in (g, column)]
    if not all(map(math.isfinite, sizes)):
        return out
    for name, layer in taps.layers.items():
        form = Plain(
            layer,
            [here.deltas[k] for k in layer.keys],
            [here.inputs[k] for k in layer.keys],
        )
        tangent = form.of_deltas([moved.deltas[k] for k in layer.keys])
        tangent += form.of_inputs([moved.inputs[k] for k in layer.keys])
        for product, plain, size in zip(
            (form.gradient, tangent[0]), (g, column), sizes, strict=True
        ):
            whole = torch.cat([plain[part].flatten() for part in layer.names])
            visible = whole.new_tensor([max(_norm([whole]), _VISIBLE * size)])
            if not agreement(
                product[None], whole[None], "layer's factors", size=visible
            ).holds:
                out.add(name)
    return out


def _norm(parts: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(p.double().square().sum()) for p in parts))
