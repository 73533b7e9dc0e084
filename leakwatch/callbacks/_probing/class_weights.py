"""What single classes count in the gradient of training, seen in its gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias, final, get_args

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import least_squares
from torch import Tensor

__all__ = ["SAME", "ClassWeights", "LossFactors", "Piece"]

# Factors are the same if they differ by less.
SAME = 0.03
_SHOWN = 8

_How: TypeAlias = Literal["average", "each", "sum"]
_Array: TypeAlias = npt.NDArray[np.float64]
# Factors of classes up to a scale of each group's own; none where none can be told.
_Groups: TypeAlias = list[dict[int, float]]


@final
@dataclass(frozen=True)
class LossFactors:
    """By how much training multiplies the criterion's loss of a sample.

    Attributes:
        common: of every sample.
        classes: of those of some classes, instead.
    """

    common: float = 1.0
    classes: Mapping[int, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.common != 1 or any(f != 1 for f in self.classes.values())

    def state(self) -> dict[str, float]:
        """As plain values."""
        own = {str(label): factor for label, factor in self.classes.items()}
        return {"all": self.common, **own} if self else {}

    @classmethod
    def from_state(cls, state: Any) -> Self:
        """The inverse of :meth:`state`.

        Raises:
            ValueError: for anything else.
        """
        try:
            factors = {str(k): float(v) for k, v in dict(state).items()}
            common = factors.pop("all", 1.0)
            classes = {int(k): v for k, v in factors.items()}
        except (TypeError, ValueError):
            raise ValueError(
                f"the factors of losses are {state!r}, expected numbers by class."
            ) from None
        if not all(map(math.isfinite, (common, *classes.values()))):
            raise ValueError(f"the factors of losses are {state!r}, not all finite.")
        return cls(common, classes)


@final
@dataclass(frozen=True, eq=False)
class Piece:
    """One batch of those that a message is the mean of.

    With accumulation and with several processes there is more than one, and training
    divides each by the weights of its own samples.

    Attributes:
        counts: samples of each class.
        parts: what each class adds to the criterion's gradient of the message,
            ``(n,)``.
    """

    counts: Mapping[int, int]
    parts: Mapping[int, Tensor]

    @property
    def samples(self) -> int:
        """How many."""
        return sum(self.counts.values())


@final
class ClassWeights:
    """Weights of classes that explain some messages, as far as they were met.

    Attributes:
        how: ``"average"``: a batch is divided by the sum of its weights, as torch's
            cross-entropy does; ``"each"``: each loss has its weight; ``"sum"``: the
            same, added up; ``None`` before anything is known.
        weights: by class; with ``"average"`` relative to the smallest.
        possible: whether weights of classes explain all messages so far, or could.
    """

    def __init__(self) -> None:
        self.how: _How | None = None
        self.weights: dict[int, float] = {}
        self._seen: dict[_How, list[dict[int, float]]] = {
            how: [] for how in get_args(_How)
        }
        self._adds = False  # the first message is nearer to a sum than to a mean

    @property
    def possible(self) -> bool:
        """Whether weights of classes explain all messages so far, or could."""
        return bool(self._seen)

    @property
    def equal(self) -> bool:
        """Whether all weights are the same."""
        found = self.weights.values()
        return not found or max(found) - min(found) <= SAME * max(found)

    def add(self, training: Tensor, pieces: Sequence[Piece], rounding: float) -> bool:
        """Looks at one more message.

        Args:
            training: its gradient, ``(n,)``.
            pieces: the batches that it is the mean of, at least one.
            rounding: share of a gradient's norm by which it may be off.

        Returns:
            Whether this message and those before show weights of classes.
        """
        single = _summed(pieces, [1.0] * len(pieces))
        sizes = [float(piece.samples) for piece in pieces]
        each = _fitted(training, single, rounding)
        found = {
            "average": _averaged(training, pieces, rounding),
            "each": each,
            "sum": each
            if len(set(sizes)) == 1
            else _fitted(training, _summed(pieces, sizes), rounding),
        }
        if each and not any(self._seen.values()):
            counts = {k: sum(p.counts.get(k, 0) for p in pieces) for k in each[0]}
            total = sum(counts[k] * f for k, f in each[0].items())
            mean = total / sum(counts.values())
            self._adds = mean > math.sqrt(sizes[0])
        for how in list(self._seen):
            groups = found[how]
            if how == "sum" and groups and groups is each:
                groups = [{k: f / sizes[0] for k, f in groups[0].items()}]
            if groups is not None:
                self._seen[how] += groups
            if groups is None or self._merged(how) is None:
                del self._seen[how]
        return self._settle()

    def _settle(self) -> bool:
        """The first way that is left, once it says something."""
        order: list[_How] = ["average", "each", "sum"]
        if self._adds:
            order = ["average", "sum", "each"]
        how = next((way for way in order if way in self._seen), None)
        weights = None if how is None else self._merged(how)
        self.how, self.weights = (how, weights) if weights else (None, {})
        return bool(weights)

    def _merged(self, how: _How) -> dict[int, float] | None:
        """One weight for each class; ``None`` where messages contradict each other."""
        merged: dict[int, float] = {}
        waiting = self._seen[how]
        while waiting:
            later = []
            for group in waiting:
                common = [k for k in group if k in merged]
                by = 1.0
                if how == "average" and merged:
                    if not common:
                        later.append(group)
                        continue
                    by = sum(group[k] for k in common) / max(
                        sum(merged[k] for k in common), 1e-300
                    )
                found = {k: f / by for k, f in group.items()}
                slack = SAME * max(map(abs, found.values()))
                if any(abs(found[k] - merged[k]) > slack for k in common):
                    return None
                merged = found | merged
            if len(later) == len(waiting):
                break  # never met together with the others
            waiting = later
        if how == "average" and merged:
            least = min((f for f in merged.values() if f > SAME), default=1.0)
            merged = {k: f / least for k, f in merged.items()}
        return merged

    def words(self) -> str:
        """The weights in words."""
        shown = sorted(self.weights.items())[:_SHOWN]
        more = ", …" if len(self.weights) > _SHOWN else ""
        nothing = 1e-4 * max(self.weights.values(), default=0.0)
        numbers = ((label, f if f > nothing else 0) for label, f in shown)
        return ", ".join(f"{label}: {f:.3g}" for label, f in numbers) + more


def _summed(pieces: Sequence[Piece], by: Sequence[float]) -> dict[int, Tensor]:
    """What each class adds in all pieces, each multiplied by a number."""
    parts: dict[int, Tensor] = {}
    for piece, factor in zip(pieces, by, strict=True):
        for label, part in piece.parts.items():
            more = factor * part.double()
            parts[label] = parts[label] + more if label in parts else more
    return parts


def _fitted(
    training: Tensor, parts: Mapping[int, Tensor], rounding: float
) -> _Groups | None:
    """Factors of the parts that give the gradient; ``None`` if nothing does.

    None of them where several would do.
    """
    rows = torch.stack([part.double() for part in parts.values()])
    lengths, target = rows.norm(dim=1), training.double()
    if not bool((lengths > 0).all()):
        return []
    unit = rows / lengths[:, None]
    gram = unit @ unit.T
    weakest = float(torch.linalg.eigvalsh(gram)[0].clamp_min(0).sqrt())
    if weakest < 1e-6:
        return []
    fit = torch.linalg.solve(gram, unit @ target)
    rest = float((target - fit @ unit).norm())
    if rest > rounding * float(target.norm()):
        return None
    found = fit / lengths
    slack = SAME * float(found.abs().max())
    if bool((rest / weakest / lengths > slack).any()):
        return []
    if bool((found < -slack).any()):
        return None
    return [dict(zip(parts, found.clamp_min(0).tolist(), strict=True))]


def _averaged(
    training: Tensor, pieces: Sequence[Piece], rounding: float
) -> _Groups | None:
    """The same, where each piece is divided by the weights of its own samples.

    Ratios of weights are told within groups of classes that met in a piece.
    """
    groups = _met(pieces)
    labels = [label for group in groups if len(group) > 1 for label in group]
    fixed = _summed(pieces, [1.0] * len(pieces))
    target = training.double()
    # A class that is alone in its batches counts there like any other.
    for label, part in fixed.items():
        if label not in labels:
            target = target - part
    scale = float(training.double().norm())
    if not labels:
        return [] if float(target.norm()) <= rounding * scale else None
    fit = _Averages(pieces, labels, target)
    weights = fit.solve()
    rest = float(np.linalg.norm(fit.residual(weights)))
    if rest > rounding * scale:
        return None
    # Along the scale of a group nothing changes: that direction is taken out.
    columns = fit.jacobian(weights)
    lengths = np.linalg.norm(columns, axis=0)
    if not (lengths > 0).all():
        return []
    places = {label: i for i, label in enumerate(labels)}
    still = np.zeros((len(groups), len(labels)))
    for row, group in zip(still, groups, strict=True):
        for label in group:
            if label in places:
                row[places[label]] = (weights * lengths)[places[label]]
    still = still[np.linalg.norm(still, axis=1) > 0]
    still /= np.linalg.norm(still, axis=1, keepdims=True)
    unit = np.concatenate([columns / lengths, still])
    weakest = float(np.linalg.svd(unit, compute_uv=False)[-1])
    told = []
    for group in groups:
        if len(group) < 2:
            continue
        inside = [places[label] for label in group]
        error = rest / max(weakest, 1e-300) / lengths[inside]
        if weakest > 1e-6 and bool((error <= SAME * weights[inside].max()).all()):
            told.append({label: float(weights[places[label]]) for label in group})
    return told


def _met(pieces: Sequence[Piece]) -> list[set[int]]:
    """Classes in groups: two that were in one piece are in one group."""
    groups: list[set[int]] = []
    for piece in pieces:
        mine = set(piece.parts)
        apart = [group for group in groups if not group & mine]
        groups = [*apart, mine.union(*(g for g in groups if g & mine))]
    return groups


@final
class _Averages:
    """The mean of pieces that are divided by their weights, as a function of these.

    Args:
        pieces: the batches.
        labels: whose weights are looked for.
        target: what it should be, ``(n,)``.
    """

    def __init__(
        self, pieces: Sequence[Piece], labels: Sequence[int], target: Tensor
    ) -> None:
        mine = [piece for piece in pieces if not piece.parts.keys().isdisjoint(labels)]
        self._target: _Array = target.cpu().numpy()
        self._counts: _Array = np.array(
            [[p.counts.get(k, 0) for k in labels] for p in mine], dtype=np.float64
        )
        self._sizes = self._counts.sum(1)
        self._parts: _Array = np.zeros((*self._counts.shape, len(self._target)))
        for rows, piece in zip(self._parts, mine, strict=True):
            for row, label in zip(rows, labels, strict=True):
                if label in piece.parts:
                    row[:] = piece.parts[label].double().cpu().numpy()

    def residual(self, weights: _Array) -> _Array:
        """What is left of the target."""
        factors = self._shares(weights)[:, None] * weights
        mean: _Array = np.einsum("pc,pcn->n", factors, self._parts)
        return mean - self._target

    def jacobian(self, weights: _Array) -> _Array:
        """Its derivative, ``(n, classes)``."""
        share = self._shares(weights)
        sums = np.einsum("c,pcn->pn", weights, self._parts)
        less = (share**2 / self._sizes)[:, None] * self._counts
        straight: _Array = np.einsum("p,pcn->nc", share, self._parts)
        bent: _Array = np.einsum("pc,pn->nc", less, sums)
        return straight - bent

    def solve(self) -> _Array:
        """The weights that leave least, each of at least 0."""
        ones = np.ones(self._counts.shape[1])
        found = [
            least_squares(
                self.residual,
                start,
                self.jacobian,
                bounds=(0, np.inf),
                x_scale="jac",
                ftol=1e-12,
                xtol=1e-12,
                gtol=1e-14,
                max_nfev=100,
            )
            for start in (self._repeated(ones), ones)
        ]
        best: _Array = min(found, key=lambda one: float(one.cost)).x
        return best

    def _repeated(self, weights: _Array) -> _Array:
        """A linear fit with the sums of weights that the last one led to."""
        for _ in range(5):
            rows = np.einsum("p,pcn->nc", self._shares(weights), self._parts)
            weights, *_ = np.linalg.lstsq(rows, self._target, rcond=None)
            weights = np.maximum(weights, 1e-3 * max(weights.max(), 1e-3))
        return weights

    def _shares(self, weights: _Array) -> _Array:
        """By how much the weights of each piece are multiplied."""
        shares: _Array = self._sizes / np.maximum(self._counts @ weights, 1e-12)
        return shares
