"""JᵀJ from tangents along all directions, in as many passes as memory asks for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor

from leakwatch.derivatives.gram.conv_factors import ConvFactors, Sum, Workspace
from leakwatch.derivatives.gram.forms import Rows
from leakwatch.derivatives.gram.sources import LayersApart, WholeJacobian
from leakwatch.derivatives.runtime.chunking import in_chunks, out_of_memory, release
from leakwatch.spectrum import lanczos

# One float64 copy of a column block of J.
_BLOCK_BYTES = 64 * 2**20
# Tangents of a chunk, and how many copies of them there are at once (measured).
_CHUNK_BYTES, _CHUNK_LEAST = 128 * 2**20, 16 * 2**20
_COPIES = 6
# What takes no more than this in float64 is kept in it from the start.
_WIDE_BYTES = 512 * 2**20
# Relative residual of λ_1 of a module's part of H.
_TOL = 1e-10


Source: TypeAlias = LayersApart | WholeJacobian


@final
@dataclass
class Assembled:
    """Sums over all parameters.

    Attributes:
        h: JᵀJ.
        along: Jᵀg.
        squared: ‖g‖².
        traces: full name of a module → trace of what its parameters add to H.
        largest: the same with λ_1 of that; empty unless asked for.
    """

    h: Tensor
    along: Tensor
    squared: Tensor
    traces: dict[str, Tensor]
    largest: dict[str, float]


@final
@dataclass
class _Pass:
    """Columns start to stop of all rows side by side, and some products."""

    start: int
    stop: int
    products: list[ConvFactors]

    @property
    def width(self) -> int:
        return self.stop - self.start + sum(map(_stored, self.products))


def assemble(
    source: Source,
    directions: Tensor,
    workspace: Workspace,
    *,
    limit: int | None = None,
    largest: bool = False,
) -> Assembled:
    """Sums what all parts contribute.

    Args:
        source: the parts and their tangents.
        directions: ``(n, *shape of x)``.
        workspace: memory.
        limit: bytes for tangents, a third of them for those being formed; more passes
            are made where the rest does not hold all that are kept.
        largest: also find λ_1 of what each module adds.

    Raises:
        RuntimeError: what the source raises; out of memory only when almost nothing
            is kept.
    """
    n = len(directions)
    one = n * directions.itemsize
    everything = one * sum(map(_stored, source.parts))
    while True:
        try:
            return _assembled(source, directions, workspace, limit, largest)
        except (RuntimeError, MemoryError) as error:
            less = min(everything, limit or everything) // 2
            if not out_of_memory(error) or less < one:
                raise
        # Out of the handler, where the traceback no longer holds what filled memory.
        limit = less
        workspace.clear()
        release()


def _assembled(
    source: Source,
    directions: Tensor,
    workspace: Workspace,
    limit: int | None,
    largest: bool,
) -> Assembled:
    n = len(directions)
    rows = [part for part in source.parts if isinstance(part, Rows)]
    products = [part for part in source.parts if isinstance(part, ConvFactors)]
    width = sum(part.width for part in rows)
    room, cap = _CHUNK_BYTES, None
    if limit is not None:
        room = min(room, max(limit // (3 * _COPIES), _CHUNK_LEAST))
        kept = max(limit - _COPIES * room, limit // 3)
        cap = max(1, kept // (n * directions.itemsize))
    passes = _passes(width, products, cap)
    widest = 8 * n * max(p.width for p in passes)
    wide = widest > min(_WIDE_BYTES, widest if limit is None else limit // 2)
    kind = directions.dtype if wide else torch.float64
    total = Sum(n, directions, workspace)
    ledger = _Ledger(source.parts, workspace, largest)
    for one in passes:
        _one_pass(source, one, rows, directions, workspace, kind, room, total, ledger)
    h, along = total.total(), total.along
    return Assembled(h, along, total.squared, ledger.traces, ledger.largest)


def _passes(width: int, products: list[ConvFactors], cap: int | None) -> list[_Pass]:
    if cap is None:
        return [_Pass(0, width, products)]
    out = [_Pass(0, 0, [])]
    for part in products:
        if out[-1].width and out[-1].width + _stored(part) > cap:
            out.append(_Pass(0, 0, []))
        out[-1].products.append(part)
    start = 0
    while start < width:
        room = cap - out[-1].width
        if room <= 0:
            out.append(_Pass(start, start, []))
            room = cap
        out[-1].start, out[-1].stop = start, min(width, start + room)
        start = out[-1].stop
    return out


def _one_pass(
    source: Source,
    one: _Pass,
    rows: list[Rows],
    directions: Tensor,
    workspace: Workspace,
    kind: torch.dtype,
    room: int,
    total: Sum,
    ledger: _Ledger,
) -> None:
    n = len(directions)
    pieces = _pieces(rows, one.start, one.stop)
    keys = {key for piece in pieces for key in piece.part.keys}
    keys |= {p.layer.keys[0] for p in one.products}
    whole = [p.part for p in pieces if isinstance(p.part.layer, str)]
    names = frozenset(name for part in whole for name in part.names)
    columns = workspace.empty("columns", n, one.stop - one.start, directions, kind)
    factors = [
        (
            p,
            workspace.empty(f"δ {i}", n, p.delta.numel(), directions, kind),
            workspace.empty(f"a {i}", n, p.a.numel(), directions, kind),
        )
        for i, p in enumerate(one.products)
    ]

    # Each chunk is written to its place at once: at these sizes copies cost as much
    # as the tangents.
    def fill(some: Tensor, numbers: Tensor) -> Tensor:
        tangents, coefficients = source.tangents(some, frozenset(keys), names)
        place = slice(int(numbers[0]), int(numbers[-1]) + 1)
        for piece in pieces:
            coordinates = piece.part.rows(tangents, coefficients)
            columns[place, piece.place] = coordinates[:, piece.inner]
        for part, delta, a in factors:
            key = part.layer.keys[0]
            delta[place] = tangents.deltas[key].flatten(1)
            a[place] = tangents.inputs[key].flatten(1)
        return numbers

    numbers = torch.arange(n)  # on the CPU, where a look waits for nothing
    widest = max((piece.part.width for piece in pieces), default=1)
    chunk = min(
        source.chunk(frozenset(keys), names) * room // _CHUNK_BYTES,
        room // (directions.itemsize * widest),
    )
    in_chunks(fill, (directions, numbers), max(1, chunk))
    g = [piece.part.gradient[piece.inner] for piece in pieces]
    if g:
        squares = _add_columns(columns, torch.cat(g), total)
        for piece in pieces:
            trace = squares[piece.place].sum()
            ledger.columns(piece, trace, columns[:, piece.place])
    for part, delta, a in factors:
        before = total.trace
        part.add_to(total, delta, a, workspace)
        ledger.products(part, total.trace - before, delta, a)


def _add_columns(columns: Tensor, g: Tensor, total: Sum) -> Tensor:
    """Adds columns to the sums; returns the square of each, ``(width,)``."""
    double = columns.dtype == torch.float64
    step = columns.shape[1] if double else _BLOCK_BYTES // (8 * len(columns))
    squares = []
    for start in range(0, columns.shape[1], max(1, step)):
        block = columns[:, start : start + max(1, step)].double()
        part = g[start : start + max(1, step)].double()
        total.add_square(block)
        total.along += block @ part
        total.squared += part @ part
        squares.append(block.square().sum(0))
    return torch.cat(squares)


@final
@dataclass(frozen=True)
class _Piece:
    """The part of some rows that one pass keeps.

    Attributes:
        part: the rows.
        inner: which of their columns.
        place: which columns of the pass.
    """

    part: Rows
    inner: slice
    place: slice


def _pieces(rows: list[Rows], start: int, stop: int) -> list[_Piece]:
    out, here = [], 0
    for part in rows:
        first, last = max(start, here), min(stop, here + part.width)
        if first < last:
            inner = slice(first - here, last - here)
            out.append(_Piece(part, inner, slice(first - start, last - start)))
        here += part.width
    return out


@final
class _Ledger:
    """Who adds what to H."""

    def __init__(
        self, parts: Sequence[Rows | ConvFactors], workspace: Workspace, largest: bool
    ) -> None:
        self.traces: dict[str, Tensor] = {}
        self.largest: dict[str, float] = {}
        self._workspace = workspace if largest else None
        self._left: Counter[str] = Counter()
        self._sums: dict[str, Tensor] = {}
        for part in parts:
            none = part.gradient if isinstance(part, Rows) else part.delta
            self.traces[_module(part)] = none.new_zeros((), dtype=torch.float64)
            self._left[_module(part)] += _stored(part)

    def columns(self, piece: _Piece, trace: Tensor, columns: Tensor) -> None:
        """Notes some columns of a part."""
        name = _module(piece.part)
        self.traces[name] = self.traces[name] + trace
        if self._workspace is not None:
            total = Sum(len(columns), columns, self._workspace, "one ")
            _add_columns(columns, piece.part.gradient[piece.inner], total)
            self._add(name, columns.shape[1], total.total())

    def products(
        self, part: ConvFactors, trace: Tensor, delta: Tensor, a: Tensor
    ) -> None:
        """Notes a part that is kept in factors."""
        name = _module(part)
        self.traces[name] = self.traces[name] + trace
        if self._workspace is not None:
            total = Sum(len(delta), delta, self._workspace, "one ")
            part.add_to(total, delta, a, self._workspace)
            self._add(name, _stored(part), total.total())

    def _add(self, name: str, width: int, h: Tensor) -> None:
        so_far = self._sums.pop(name, None)
        h = h if so_far is None else h.add_(so_far)
        self._left[name] -= width
        if self._left[name]:
            self._sums[name] = h
        else:
            # One sample without a number must not cost the others theirs.
            finite = bool(torch.isfinite(h).all())
            top = float(lanczos(h, tol=_TOL).eigenvalues[0, 0]) if finite else math.nan
            self.largest[name] = top if math.isnan(top) else max(0.0, top)


def _module(part: Rows | ConvFactors) -> str:
    names = part.names if isinstance(part, Rows) else part.layer.names
    return names[0].rpartition(".")[0]


def _stored(part: Rows | ConvFactors) -> int:
    if isinstance(part, Rows):
        return part.width
    return part.delta.numel() + part.a.numel()
