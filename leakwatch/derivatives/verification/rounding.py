"""Tells a disagreement of two evaluations from what rounding alone can do to them.

Two correct evaluations of one network differ by rounding, and a network can amplify
that to any size: activations that grow from layer to layer, a long recurrence, a
forward in lower precision. How far it does is found by an experiment: rounding in every
layer is as if weights and buffers were others by a few units in the last place, so they
are moved by that much, and what the result does is measured. A result must be the same
each time that it is evaluated: what is drawn at random would explain itself.

Results are compared at weights and directions in general position: what holds there
rests on no zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from leakwatch.derivatives.runtime import Weights

__all__ = ["Rounding", "normal", "scale", "scales", "shaken_weights"]

# In units of the last place; a sum over a layer collects about that many.
_NUDGE = 32
# Two random directions know the order of magnitude, not more.
_SAFETY = 4
# A nudge that is no longer small says nothing; bfloat16 gets there.
_LARGEST = 1e-2
# Below, a result has lost fewer digits than anybody reads.
_WORTH_SAYING = 1e4


class Rounding:
    """What rounding can do to a network's results.

    Args:
        lower: types of lower precision than its input's in which it also computes.

    Attributes:
        gain: the largest factor from a relative change of weights and buffers to that
            of a result, among those measured because of a disagreement that rounding
            explains; 0 when there was none.

    Example:
        >>> at = Weights({"w": torch.ones(1, dtype=torch.float64)}, {})
        >>> rounding = Rounding()
        >>> def steep(at: Weights, x: Tensor) -> Tensor:
        ...     return (at.shared["w"] * x) ** 1000
        >>> x = torch.ones((), dtype=torch.float64)
        >>> [rounding.explains(gap, steep, at, x) for gap in (1e-12, 1e-3)]
        [True, False]
    """

    def __init__(self, lower: Iterable[torch.dtype] = ()) -> None:
        self.lower = tuple(lower)
        self.gain = 0.0

    def explains(
        self,
        gap: float,
        result: Callable[[Weights, Tensor], Tensor],
        at: Weights,
        x: Tensor,
    ) -> bool:
        """Whether two evaluations of a result may be apart by ``gap``.

        Args:
            gap: norm of their difference.
            result: evaluates it once more, at other weights and the same input.
            at: the weights.
            x: the input.

        Returns:
            False when rounding can't have done that.
        """
        here = result(at, x).detach().double()
        own = _NUDGE * torch.finfo(x.dtype).eps
        # Lower precision somewhere is a staircase of that step, no error of a layer.
        nudge = min(max(own, self._eps(x.dtype)), _LARGEST)
        moves = []
        for seed in (1, 2):
            generator = torch.Generator().manual_seed(seed)
            shared, fixed = (
                {k: _moved(t, nudge, generator) for k, t in part.items()}
                for part in (at.shared, at.fixed)
            )
            # Not the input, which is what it is: a network may take its integer part.
            there = result(Weights(shared, fixed), x)
            moves.append(float((there.detach().double() - here).norm()))
        reach = max(moves)
        if not gap <= _SAFETY * reach:
            return False
        size = max(float(here.norm()), reach)
        self.gain = max(self.gain, reach / size / nudge)
        return True

    def notes(self, dtype: torch.dtype) -> list[str]:
        """What a reader of results should know.

        Args:
            dtype: of the results; the examination may have been in a higher one.

        Returns:
            A sentence, or nothing when rounding stays small.
        """
        if self.gain < _WORTH_SAYING:
            return []
        lowest = max((dtype, *self.lower), key=lambda each: torch.finfo(each).eps)
        lost = min(1.0, self.gain * self._eps(dtype))
        return [
            f"it amplifies rounding {self.gain:.0e} times, so that of its results a "
            f"share of about {lost:.0e} is rounding in {lowest}; activations that grow "
            f"from layer to layer do that, as with normalisation statistics that don't "
            f"fit the data"
        ]

    def _eps(self, dtype: torch.dtype) -> float:
        return max(torch.finfo(each).eps for each in (dtype, *self.lower))


def _moved(t: Tensor, nudge: float, generator: torch.Generator) -> Tensor:
    if not t.is_floating_point():
        return t
    noise = 2 * torch.rand(t.shape, generator=generator, dtype=torch.float64) - 1
    return t * (1 + nudge * noise.to(t))


def shaken_weights(at: Weights) -> Weights:
    """The weights moved by up to a tenth, and zeros to small numbers."""
    shared = {}
    generator = torch.Generator().manual_seed(0)
    for name, t in at.shared.items():
        noise = torch.rand(t.shape, generator=generator).to(t) - 0.5
        # Signs are kept: a weight may be under a root or a logarithm.
        shared[name] = torch.where(t == 0, 0.02 * noise, t * (1 + 0.2 * noise))
    return Weights(shared, at.fixed)


def scale(x: Tensor) -> float:
    """Root mean square of the entries, 1 where all are zero."""
    return float(x.double().square().mean().sqrt()) or 1.0


def scales(x: Tensor) -> Tensor:
    """:func:`scale` of each sample, ``(batch,)``, float64."""
    size = x.double().reshape(len(x), -1).square().mean(1).sqrt()
    return torch.where(size > 0, size, 1.0)


def normal(like: Tensor, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Standard normal numbers, the same for a seed in every type and on any device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)
