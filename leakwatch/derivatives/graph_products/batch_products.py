"""Many products with J, Jᵀ and H of one batch: by graphs, where these are right.

A solver takes tens of products at the same samples.
``recorded_graph`` makes one graph for a group of them and takes every
product from it, without ``vmap`` and without gradients of single weights. It is used
wherever it is right, which is seen, not assumed: each sample's
gradient as the graph gives it is compared with the one that was found before, its
first J v with a finite difference of gradients or with that of :class:`GradientMap`,
and its first Jᵀu with that J v. Then, in turn:

``"batch"``: samples in one piece, if every shared parameter belongs to a layer that
comes apart and the network keeps its samples apart.

``"alone"``: one graph for each sample, where parameters of no known layer (recurrent
weights, embeddings of positions) are differentiated as they are. Not used on a GPU for
networks that ``vmap`` can batch.

``"plain"``: :meth:`GradientMap.jvp` and :meth:`GradientMap.vjp`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from leakwatch.derivatives.gradient_map import GradientMap
from leakwatch.derivatives.graph_products.recorded_graph import Recorded
from leakwatch.derivatives.layers.layout import Opening, opening
from leakwatch.derivatives.runtime.chunking import out_of_memory, release
from leakwatch.derivatives.runtime.rng_and_precision import plain_arithmetic
from leakwatch.derivatives.verification.agreement import Quantity, agreement
from leakwatch.derivatives.verification.compare import near, shown
from leakwatch.status import shortened

__all__ = ["BatchProducts", "Way"]

_log = logging.getLogger(__name__)

Way: TypeAlias = Literal["batch", "alone", "plain"]
_Product: TypeAlias = Literal["push", "pull", "normal"]

# What one group takes while a product is formed, and what all graphs hold.
_GROUP_BYTES = 256 * 2**20
_HELD_BYTES = 2**30
# In units of the numbers that a graph holds of its layers.
_HELD, _PEAK = 1.5, 3

_NOTHING: tuple[list[int], Tensor] = ([], torch.empty(0))


class _UnfitError(Exception):
    """What a graph gives is not what it should."""


@final
@dataclass(frozen=True, eq=False)
class _Group:
    members: list[int]
    graph: Recorded
    bytes: int

    def product(self, name: _Product, v: Tensor, wanted: list[int]) -> Tensor:
        """For some of its members; the others get a direction of zero."""
        take = getattr(self.graph, name)
        if wanted == self.members:
            all_rows: Tensor = take(v)
            return all_rows
        places = [self.members.index(i) for i in wanted]
        directions = v.new_zeros(len(self.members), v.shape[1])
        directions[places] = v
        rows: Tensor = take(directions)[places]
        return rows


@final
class BatchProducts:
    """J v, Jᵀu and H v of each sample of a batch, many times.

    The weights are those of the first product. When they have changed since then (see
    :meth:`GradientMap.stamp`), all further products are plain ones, at the new weights.
    A plain attribute of the network that changes in between is not noticed.

    Args:
        gradients: the gradient map.
        x: network inputs.
        y: labels.
        weight: factor on the loss of each sample.
        unit: ĝ of each sample, ``(batch, d_θ)``.
        length: ‖g‖ of each sample with the weight, ``(batch,)``.

    Attributes:
        rounding: how far rounding has moved J v of each sample for one standard normal
            v, ``(batch,)``: the root of an unbiased estimate of ‖ΔJ‖_F², and of what a
            finite difference is off by. Seen at the first product in float32; NaN
            where that was not so.
        shown: of which samples a finite difference was seen to be what J says, at the
            first product, ``(batch,)``.
        moving: of which samples a product was seen that is not zero, ``(batch,)``.
        most_held: bytes that all its graphs may keep.

    Example:
        >>> import torch
        >>> at = GradientMap(torch.nn.Linear(3, 2), dtype=torch.float64)
        >>> x, y, one = torch.rand(4, 3), torch.tensor([0, 1, 1, 0]), torch.ones(4)
        >>> g = at(x, y)
        >>> length = g.norm(dim=1)
        >>> products = BatchProducts(at, x, y, one, g / length[:, None], length)
        >>> v = torch.rand(4, 3, dtype=torch.float64)
        >>> expected = at.vjp(x, y, at.jvp(x, y, v))
        >>> torch.testing.assert_close(products.normal(v), expected)
        >>> products.way
        'batch'
    """

    def __init__(
        self,
        gradients: GradientMap,
        x: Float[Tensor, "batch ..."],
        y: Shaped[Tensor, "batch ..."],
        weight: Float[Tensor, " batch"],
        unit: Float[Tensor, "batch d_theta"],
        length: Float[Tensor, " batch"],
    ) -> None:
        self._gradients = gradients
        self._x, self._y, self._weight = x, y, weight
        self._unit, self._length = unit, length
        self._way: Way | None = None
        self._why = ""
        self._stamp: tuple[tuple[int, int], ...] = ()
        self._alone_allowed = False
        self._opening: Opening | None = None
        self._size = 1
        self._last: tuple[Tensor | None, int, list[int]] = (None, 0, [])
        self._compared: dict[_Product, set[int]] = {}
        self._first = _NOTHING
        self.rounding = torch.full_like(length, math.nan)
        self.moving = torch.zeros_like(length, dtype=torch.bool)
        self.shown = torch.zeros_like(self.moving)
        self.most_held = _HELD_BYTES
        self._groups: dict[int, _Group] = {}

    @property
    def way(self) -> Way | None:
        """How products are formed; ``None`` before the first one."""
        return self._way

    @property
    def why(self) -> str:
        """Why not all in one piece; empty for ``"batch"``."""
        return self._why

    def comes_whole(self, rows: int) -> bool:
        """Whether a product of some rows is one of all of them, which are then copied.

        Args:
            rows: how many.
        """
        one = self._way == "batch" and self._size >= len(self._x)
        return one and 2 * rows > len(self._x)

    def push(
        self, v: Float[Tensor, "rows d_x"], rows: Shaped[Tensor, " rows"] | None = None
    ) -> Float[Tensor, "rows d_theta"]:
        """J v.

        Args:
            v: a direction for each sample, in the map's precision.
            rows: positions of the samples in the batch; all by default.

        Returns:
            ``weight · J v`` of these samples.

        Raises:
            ValueError: if rows is empty, repeats a sample or leaves the batch.
        """
        return self._product("push", v, rows)

    def pull(
        self,
        u: Float[Tensor, "rows d_theta"],
        rows: Shaped[Tensor, " rows"] | None = None,
    ) -> Float[Tensor, "rows d_x"]:
        """Jᵀu, with the arguments of :meth:`push`."""
        return self._product("pull", u, rows)

    def normal(
        self, v: Float[Tensor, "rows d_x"], rows: Shaped[Tensor, " rows"] | None = None
    ) -> Float[Tensor, "rows d_x"]:
        """H v = JᵀJ v, with the arguments of :meth:`push`, ``weight²`` times."""
        return self._product("normal", v, rows)

    # -- which way -----------------------------------------------------------------

    def _product(self, product: _Product, v: Tensor, rows: Tensor | None) -> Tensor:
        chosen = self._chosen(rows)
        if len(set(chosen)) != len(chosen) or not set(chosen) <= set(
            range(len(self._x))
        ):
            raise ValueError(
                f"rows must be different positions in the batch, from 0 to "
                f"{len(self._x) - 1}, got {chosen}."
            )
        if not chosen:
            raise ValueError("rows is empty; ask for one sample at least.")
        if self._way is None:
            self._begin()
        if self._way != "plain" and self._stamp != self._gradients.stamp():
            self._retreat("the weights have changed since the first product", "plain")
        while self._way != "plain":
            result = self._attempt(product, v, chosen)
            if result is not None:
                return result
        return self._plainly(product, v, rows)

    def _chosen(self, rows: Tensor | None) -> list[int]:
        """The positions; looked at again only in another tensor than last time."""
        if rows is None:
            return list(range(len(self._x)))
        last, version, chosen = self._last
        if rows is not last or rows._version != version:
            chosen = rows.tolist()
            self._last = rows, rows._version, chosen
        return chosen

    def _attempt(
        self, product: _Product, v: Tensor, chosen: list[int]
    ) -> Tensor | None:
        """The product from graphs; ``None`` if it has to be tried another way."""
        try:
            with plain_arithmetic(self._x.device.type):
                return self._by_groups(product, v, chosen)
        except Exception as error:
            text = str(error).strip() or type(error).__name__
            why = shortened(text.splitlines()[0], 200).rstrip(".")
            memory = out_of_memory(error)
        # Out of the handler, where the traceback no longer holds what filled memory.
        self._groups.clear()
        release()
        if memory and self._size > 1:
            self._size //= 2
            return None
        if self._way == "batch" and len(self._x) > 1 and not memory:
            self._gradients.together = False
            self._retreat(why, "alone" if self._alone_allowed else "plain")
        else:
            self._retreat(why, "plain")
        if self._way == "plain" and not memory:
            self._gradients.unrecorded = why
        _log.info("leakwatch takes products another way (%s): %s", self._way, why)
        return None

    def _retreat(self, why: str, way: Way) -> None:
        self._way, self._why = way, why
        self._groups.clear()
        self._size, self._compared, self._first = 1, {}, _NOTHING
        self.rounding = torch.full_like(self.rounding, math.nan)
        self.shown = torch.zeros_like(self.shown)

    def _begin(self) -> None:
        """Finds how to begin."""
        at, x = self._gradients, self._x
        if at.unrecorded or not self._usable:
            nothing = "no sample of the batch has a gradient to compare with"
            self._retreat(at.unrecorded or nothing, "plain")
            return
        first = self._usable[0]
        two = [first, *(i for i in range(len(x)) if i != first)][:2]
        with at.evaluation(x) as weights:
            xs, ys = at.prepared(x[two], self._y[two])
            batched = at.resolve(weights, xs, ys) == "vmap"
            try:
                where = opening(at, weights, xs, ys)
            except Exception:  # it may take one sample at a time
                where = None
        self._stamp = at.stamp()
        self._alone_allowed = not batched or x.device.type == "cpu"
        self._way, self._opening = "batch", where
        if len(x) > 1 and (where is None or not at.together):
            why = "a sample's loss, or what its layers see, depends on the others"
        elif where is not None and where.others and len(x) > 1:
            names = [name.removeprefix("module.") for name in where.others]
            more = " …" if len(names) > 3 else ""
            why = f"{', '.join(names[:3])}{more} belong to no layer that comes apart"
        else:
            numbers = 1 if where is None else max(1, where.numbers)
            each = numbers * at.dtype.itemsize
            most = at.chunk_size or _GROUP_BYTES // (_PEAK * each)
            self._size = max(1, min(most, len(x)))
            return
        self._retreat(why, "alone" if self._alone_allowed else "plain")

    def _plainly(self, product: _Product, v: Tensor, rows: Tensor | None) -> Tensor:
        x, y, w = self._x, self._y, self._weight
        if rows is not None:
            x, y, w = x[rows], y[rows], w[rows]
        if product == "pull":
            return self._gradients.vjp(x, y, v, w)
        there = self._gradients.jvp(x, y, v, w)
        return there if product == "push" else self._gradients.vjp(x, y, there, w)

    # -- groups --------------------------------------------------------------------

    def _by_groups(self, product: _Product, v: Tensor, chosen: list[int]) -> Tensor:
        parts, places = [], []
        for start in range(0, len(self._x), self._size):
            rows = [r for r, i in enumerate(chosen) if 0 <= i - start < self._size]
            if rows:
                wanted = [chosen[r] for r in rows]
                group = self._group(start, wanted)
                self._compare(product, group)
                # Rows of u and J v can be so large that every copy counts.
                some = v if rows == list(range(len(v))) else v[rows]
                parts.append(group.product(product, some, wanted))
                places += rows
        result = torch.cat(parts) if len(parts) > 1 else parts[0]
        if places == sorted(places):
            return result
        return result[torch.tensor(places, device=result.device).argsort()]

    def _group(self, start: int, wanted: list[int]) -> _Group:
        """A graph with the wanted samples, and few others."""
        held = self._groups.get(start)
        if held is not None:
            close = len(held.members) < 2 * len(wanted)
            if close and set(wanted) <= set(held.members):
                return held
            del self._groups[start], held
        whole = self._whole(start)
        group = self._made(whole if 2 * len(wanted) > len(whole) else wanted)
        total = group.bytes + sum(g.bytes for g in self._groups.values())
        if total <= self.most_held:
            self._groups[start] = group
        return group

    def _whole(self, start: int) -> list[int]:
        return list(range(start, min(start + self._size, len(self._x))))

    def _made(self, members: list[int]) -> _Group:
        at = self._gradients
        with at.evaluation(self._x) as weights:
            xs, ys = at.prepared(self._x[members], self._y[members])
            where = self._opening
            if where is None or self._way == "alone":
                # Another sample may take another way through the network.
                where = opening(at, weights, xs, ys)
            if where is None:
                raise _UnfitError("its layers do not come apart by sample")
            w = self._weight[members].to(xs)
            graph = Recorded(at, weights, where, xs, ys, w)
        numbers = _HELD * where.numbers * len(members) + weights.size
        if where.others:  # as they are, with their gradients
            numbers += 2 * weights.size * len(members)
        size = int(numbers * at.dtype.itemsize)
        self._compare_gradients(graph, members)
        return _Group(members, graph, size)

    # -- comparisons ---------------------------------------------------------------

    @property
    def _usable(self) -> list[int]:
        """Samples whose gradient can show that something is wrong."""
        usable = torch.isfinite(self._length) & (self._length > 0)
        positions: list[int] = usable.nonzero()[:, 0].tolist()
        return positions

    def _compare_gradients(self, graph: Recorded, members: list[int]) -> None:
        length = self._length[members].to(self._unit.dtype)
        expected = self._unit[members] * length[:, None]
        if not agreement(graph.gradient(), expected, "product from a graph").holds:
            raise _UnfitError(
                "a gradient of a sample from what its layers see differs from that of "
                "the sample alone"
            )

    def _compare(self, product: _Product, group: _Group) -> None:
        """Each sample of a graph, once for each of the three products.

        One sample says nothing about the others: an operation may have a second
        derivative at one input and none, or another one, at the next.
        """
        members = group.members
        pushed = self._compared.setdefault("push", set())
        done = self._compared.setdefault(product, set())
        if done >= set(members):
            return
        v = self._directions(members)
        if self._first[0] != members:
            self._first = members, group.graph.push(v)
        there = self._first[1]
        if not pushed >= set(members):
            self._compare_push(members, v, there)
            pushed |= set(members)
        if product != "push":
            self._compare_back(product, group, v, there)
            self._first = _NOTHING
            done |= set(members)

    def _compare_push(self, members: list[int], v: Tensor, found: Tensor) -> None:
        """J v, which is not yet known to be right, with one from elsewhere."""
        at, rows = self._gradients, torch.tensor(members, device=self._x.device)
        x, y, w = self._x[rows], self._y[rows], self._weight[rows]
        try:
            right = self._precise_push(rows, v, found)
        except Exception:  # a network that has no float64
            right = at.jvp(x, y, v, w)
        if not agreement(found, right, "product from a graph", dtype=at.dtype).holds:
            raise _UnfitError("a product from its layers differs from a plain one")
        self.moving[rows] |= (found != 0).any(1)
        if right.dtype != at.dtype:
            self.rounding[rows] = torch.linalg.vector_norm(right - found, dim=1)

    def _precise_push(self, rows: Tensor, v: Tensor, found: Tensor) -> Tensor:
        """J v in float64, from no graph.

        It is a finite difference of gradients where that is what was found: a
        derivative could say no more.
        """
        at = self._gradients.in_dtype(torch.float64)
        x, y, w = self._x[rows], self._y[rows], self._weight[rows]
        if not self._gradients.sharp:
            return at.jvp(x, y, v, w)
        change = at.difference(x, y, v, w)
        close = near(change, found)
        if found.dtype == change.dtype:  # whose digits a difference does not have
            close = torch.zeros_like(close)
        left = (~close).nonzero()[:, 0]
        if len(left):
            there = at.jvp(x[left], y[left], v[left], w[left])
            close[left] = shown(change[left], there, at.step(x[left]))
            change[left] = there
        self.shown[rows] = close
        return change

    def _compare_back(
        self, product: _Product, group: _Group, v: Tensor, there: Tensor
    ) -> None:
        """Jᵀ J v by ⟨Jᵀ J v, v⟩ = ‖J v‖²; with one from elsewhere if that is off."""
        at, members = self._gradients, group.members
        back = group.graph.pull(there) if product == "pull" else group.graph.normal(v)
        along = (back.double() * v.double()).sum(1, keepdim=True)
        square = torch.linalg.vector_norm(
            there, dim=1, keepdim=True, dtype=torch.float64
        ).square()
        known: Quantity = "product and its adjoint"
        if not agreement(along, square, known, dtype=at.dtype).holds:
            rows = torch.tensor(members, device=self._x.device)
            right = at.vjp(self._x[rows], self._y[rows], there, self._weight[rows])
            if not agreement(back, right, "product from a graph").holds:
                raise _UnfitError("a product from its layers differs from a plain one")
        self.moving[members] |= (back != 0).any(1)

    def _directions(self, members: list[int]) -> Tensor:
        generator = torch.Generator().manual_seed(members[0])
        size = len(members), self._x[0].numel()
        v = torch.randn(size, generator=generator, dtype=torch.float64)
        return v.to(self._x.device, self._gradients.dtype)
