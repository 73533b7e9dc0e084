"""Tangents of what goes into and comes back to the layers of a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from leakwatch.derivatives.gradient_map import GradientMap
from leakwatch.derivatives.layers.taps import Layer, Tapping
from leakwatch.derivatives.runtime import Weights
from leakwatch.derivatives.runtime.chunking import in_chunks

# Tangents of the layers' inputs and outputs, for one chunk of directions.
CHUNK_BYTES = 128 * 2**20


@final
@dataclass(frozen=True)
class Parts:
    """Something about each call of each layer, and about the other parameters.

    Attributes:
        deltas: gradient at the output of a call, by key.
        inputs: what goes into it, by key.
        others: gradients of parameters that are not taken apart, by name.
    """

    deltas: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    others: dict[str, Tensor] = field(default_factory=dict)


@final
class Taps:
    """One sample's loss, opened at the calls of the given layers.

    Args:
        gradients: the gradient map, inside its ``evaluation``.
        at: its weights.
        x: one sample, without a batch dimension.
        y: its label.
        weight: factor on the loss.
        layers: those to open, by the name of their weight.
        last: key of the call after which none of the others comes.

    Attributes:
        layers: as given.
        last: as given.
        others: parameters that belong to none of them, by name.
    """

    def __init__(
        self,
        gradients: GradientMap,
        at: Weights,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        layers: Mapping[str, Layer],
        last: str,
    ) -> None:
        self._gradients, self._at = gradients, at
        self._x, self._y, self._weight = x, y, weight
        self.layers, self.last = dict(layers), last
        held = {name for layer in layers.values() for name in layer.names}
        self.others = {k: p for k, p in at.shared.items() if k not in held}
        self._held = {k: p for k, p in at.shared.items() if k in held}
        self._ids = {id(at.shared[name]): name for name in layers}
        self._zeros = {
            key: x.new_zeros(call.output)
            for layer in layers.values()
            for key, call in zip(layer.keys, layer.calls, strict=True)
        }
        self._keys = frozenset(self._zeros)

    def here(self) -> Parts:
        """δ, a and the other gradients at the sample itself."""
        parts = self._parts(self._x, self._zeros, self._keys, frozenset(self.others))
        return Parts(*({k: t.detach() for k, t in p.items()} for p in parts))

    def everything(
        self, directions: Tensor, keys: frozenset[str], names: frozenset[str]
    ) -> Parts:
        """Tangents of all factors along many directions: forward over reverse.

        Args:
            directions: ``(k, *shape of x)``.
            keys: calls whose inputs are of interest.
            names: other parameters that are of interest.
        """

        def one(v: Tensor) -> tuple[dict[str, Tensor], ...]:
            # Tangents of zero, where none at all would take torch a slow way to the
            # same.
            out: tuple[dict[str, Tensor], ...] = jvp(
                lambda x, added: self._parts(x, added, keys, names),
                (self._x, self._zeros),
                (v, self._zeros),
            )[1]
            return out

        return Parts(*vmap(one)(directions))

    def forwards(self, directions: Tensor, keys: frozenset[str]) -> Parts:
        """Tangents of inputs, and of δ at the last call only: forward mode."""

        def end(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            def loss(added: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                value, taps = self._run(x, {self.last: added}, self.others, keys)
                return value, taps.inputs

            delta: tuple[Tensor, dict[str, Tensor]] = grad(loss, has_aux=True)(
                self._zeros[self.last]
            )
            return delta

        def one(v: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            out: tuple[Tensor, dict[str, Tensor]] = jvp(end, (self._x,), (v,))[1]
            return out

        delta, inputs = vmap(one)(directions)
        return Parts({self.last: delta}, inputs)

    def bends(self, v: Tensor, towards: Tensor) -> Tensor:
        """Whether what comes back from the last call depends on the input itself.

        Where it does not, δ of each call is a constant matrix times δ of the last one,
        and so are their tangents. A matrix that changes along a random direction shows
        it by a tangent; where nothing but ReLUs, max-pools and the like lie between,
        there is none at all, which is why this asks for an exact zero.

        Args:
            v: a random direction, shaped like the sample.
            towards: another one, shaped like δ at the last call.
        """

        def back(x: Tensor) -> dict[str, Tensor]:
            return self._back(x, towards)

        tangents = jvp(back, (self._x,), (v,))[1]
        return torch.stack([t.ne(0).any() for t in tangents.values()]).any()

    def backwards(self, rows: Tensor) -> dict[str, Tensor]:
        """What each of many δ at the last call becomes at every call, by key."""

        def one(row: Tensor) -> dict[str, Tensor]:
            return self._back(self._x, row)

        deltas: dict[str, Tensor] = vmap(one)(rows)
        return deltas

    def plain(self, v: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gradient and its tangent along v by parameter, with nothing taken apart."""

        def g(x: Tensor) -> dict[str, Tensor]:
            out: dict[str, Tensor] = grad(self._gradients.sample_loss)(
                self._at.shared, self._at.fixed, x, self._y, self._weight
            )
            return out

        gradient, tangent = jvp(g, (self._x,), (v,))[:2]
        return gradient, tangent

    def chunk(self, keys: frozenset[str], *, outputs: bool) -> int:
        """How many tangents are formed at once."""
        each = 0
        for layer in self.layers.values():
            for key, call in zip(layer.keys, layer.calls, strict=True):
                each += call.input.numel() if key in keys else 0
                each += call.output.numel() if outputs else 0
        limit = self._gradients.chunk(Weights(self.others, {}))
        return min(limit, max(1, CHUNK_BYTES // max(1, each * self._x.itemsize)))

    def _back(self, x: Tensor, towards: Tensor) -> dict[str, Tensor]:
        def end(added: dict[str, Tensor]) -> Tensor:
            _, taps = self._run(x, added, self.others, frozenset())
            if taps.output is None:
                raise RuntimeError(f"the call {self.last} was not made again")
            return taps.output

        before = {k: t for k, t in self._zeros.items() if k != self.last}
        pull = vjp(end, before)[1]
        deltas: dict[str, Tensor] = pull(towards)[0]
        # A copy: what is returned must depend on nothing but its argument.
        return deltas | {self.last: towards.clone()}

    def _parts(
        self,
        x: Tensor,
        added: dict[str, Tensor],
        keys: frozenset[str],
        names: frozenset[str],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        asked = {k: p for k, p in self.others.items() if k in names}
        silent = {k: p for k, p in self.others.items() if k not in names}

        def loss(
            added: dict[str, Tensor], free: dict[str, Tensor]
        ) -> tuple[Tensor, dict[str, Tensor]]:
            value, taps = self._run(x, added, free | silent, keys)
            return value, taps.inputs

        (deltas, others), inputs = grad(loss, argnums=(0, 1), has_aux=True)(
            added, asked
        )
        return deltas, inputs, others

    def _run(
        self,
        x: Tensor,
        added: Mapping[str, Tensor],
        free: dict[str, Tensor],
        keys: frozenset[str],
    ) -> tuple[Tensor, Tapping]:
        taps = Tapping(self._ids, added, keys, self.last)
        with taps:
            value = self._gradients.sample_loss(
                free, self._at.fixed | self._held, x, self._y, self._weight
            )
        return value, taps


def basis(taps: Taps, rows: Tensor, chunk: int) -> dict[str, Tensor]:
    """:meth:`Taps.backwards` in chunks.

    Args:
        taps: the opened network.
        rows: δ at the last call, ``(r, *shape)``.
        chunk: rows at once.

    Returns:
        Key of a call → ``(r, *shape of its output)``.
    """
    keys: Sequence[str] = sorted(k for lay in taps.layers.values() for k in lay.keys)
    deltas: dict[str, list[Tensor]] = {key: [] for key in keys}

    def some(part: Tensor) -> Tensor:
        back = taps.backwards(part)
        for key in keys:
            deltas[key].append(back[key])
        return part

    in_chunks(some, (rows,), chunk)
    return {key: torch.cat(pieces) for key, pieces in deltas.items()}
