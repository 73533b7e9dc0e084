"""What single classes count in the gradient of training, seen in its gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias, final

import torch
from torch import Tensor

__all__ = ["SAME", "ClassWeights", "LossFactors"]

# Factors are the same if they differ by less.
SAME = 0.03
# Weights of a batch add up to its size by chance to less than this.
_AVERAGED = 0.01
_SHOWN = 8

_How: TypeAlias = Literal["average", "each", "sum"]


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
@dataclass(frozen=True)
class _Seen:
    """One message.

    Attributes:
        factors: of the classes in its batch, as parts of the plain mean.
        mean: their average over the batch.
        samples: in the batch.
    """

    factors: Mapping[int, float]
    mean: float
    samples: int


@final
class ClassWeights:
    """Weights of classes that explain some messages, as far as they were met.

    Attributes:
        how: ``"average"``: a batch is divided by the sum of its weights, as torch's
            cross-entropy does; ``"each"``: each loss has its weight; ``"sum"``: the
            same, added up; ``None`` before anything is known.
        weights: by class; with ``"average"`` relative to the smallest.
    """

    def __init__(self) -> None:
        self.how: _How | None = None
        self.weights: dict[int, float] = {}
        self._seen: list[_Seen] = []

    def add(
        self,
        training: Tensor,
        parts: Mapping[int, Tensor],
        counts: Mapping[int, int],
        rounding: float,
    ) -> bool | None:
        """Looks at one more message.

        Args:
            training: its gradient, ``(n,)``.
            parts: what each class adds to the criterion's gradient.
            counts: samples of each class.
            rounding: share of a gradient's norm by which it may be off.

        Returns:
            Whether weights of classes explain this message and those before; ``None``
            where that can't be told.
        """
        factors = _fitted(training, parts, rounding)
        if not factors:
            return None if factors is None else False
        samples = sum(counts.values())
        mean = sum(counts[label] * f for label, f in factors.items()) / samples
        self._seen.append(_Seen(factors, mean, samples))
        return self._settle()

    def _settle(self) -> bool:
        each, sizes = [1.0] * len(self._seen), [float(s.samples) for s in self._seen]
        ways: list[tuple[_How, list[float] | None]] = [
            ("average", None),
            ("each", each),
            ("sum", sizes),
        ]
        if self._seen[0].mean > math.sqrt(sizes[0]):  # nearer to a sum
            ways[1:] = ways[:0:-1]
        for how, scale in ways:
            weights = self._merged(scale)
            if weights is not None:
                self.how, self.weights = how, weights
                return True
        return False

    def _merged(self, scale: list[float] | None) -> dict[int, float] | None:
        """One weight for each class; ``None`` where messages contradict each other.

        Args:
            scale: what the factors of each message are divided by; ``None``: messages
                were averaged by weight, so that only ratios count.
        """
        if scale is None and any(abs(s.mean - 1) > _AVERAGED for s in self._seen):
            return None
        merged: dict[int, float] = {}
        for i, seen in enumerate(self._seen):
            common = [k for k in seen.factors if k in merged]
            by = 1.0 if scale is None else scale[i]
            if scale is None and merged:
                if not common:
                    continue
                by = sum(seen.factors[k] for k in common) / max(
                    sum(merged[k] for k in common), 1e-300
                )
            found = {k: f / by for k, f in seen.factors.items()}
            slack = SAME * max(map(abs, found.values()))
            if any(abs(found[k] - merged[k]) > slack for k in common):
                return None
            merged = found | merged
        if scale is None:
            least = min((f for f in merged.values() if f > SAME), default=1.0)
            merged = {k: f / least for k, f in merged.items()}
        return merged

    def words(self) -> str:
        """The weights in words."""
        shown = sorted(self.weights.items())[:_SHOWN]
        more = ", …" if len(self.weights) > _SHOWN else ""
        return ", ".join(f"{label}: {f:.3g}" for label, f in shown) + more


def _fitted(
    training: Tensor, parts: Mapping[int, Tensor], rounding: float
) -> dict[int, float] | None:
    """Factors of the parts that give the gradient; none if nothing does.

    ``None`` where several would do.
    """
    rows = torch.stack([part.double() for part in parts.values()])
    lengths, target = rows.norm(dim=1), training.double()
    if not bool((lengths > 0).all()):
        return None
    unit = rows / lengths[:, None]
    gram = unit @ unit.T
    weakest = float(torch.linalg.eigvalsh(gram)[0].clamp_min(0).sqrt())
    if weakest < 1e-6:
        return None
    fit = torch.linalg.solve(gram, unit @ target)
    rest = float((target - fit @ unit).norm())
    if rest > rounding * float(target.norm()):
        return {}
    found = fit / lengths
    slack = SAME * float(found.abs().max())
    if bool((rest / weakest / lengths > slack).any()):
        return None
    if bool((found < -slack).any()):
        return {}
    return dict(zip(parts, found.clamp_min(0).tolist(), strict=True))
