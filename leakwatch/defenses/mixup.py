"""Sharing the gradient of a mixture of samples."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from leakwatch.checks import check_inputs
from leakwatch.defenses.base import Defense, Knowledge, Needs, Shared, needed
from leakwatch.defenses.mixing import Mixing
from leakwatch.defenses.samples import Samples

__all__ = ["MixUp"]


@final
@dataclass(frozen=True, eq=False)
class MixUp(Defense):
    """Shares the gradient of αx + (1 − α)x_p, with labels mixed the same way.

    Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018; as a defense:
    Huang et al., "Evaluating Gradient Inversion Attacks and Defenses", NeurIPS 2021,
    and I²F, Section 3.3. Its budget follows from the samples. Partners and
    coefficients, the score of I²F for it, and what an attacker undoes are in
    ``shared.knowledge.mixing``: see :class:`leakwatch.defenses.Mixing`.

    Args:
        coefficient: α, the share of the private sample, above 0 and at most 1; or
            (low, high), drawn uniformly for each sample: (0, 1) is mixup's Beta(1, 1).
        mix_labels: whether the loss is mixed too, or that under the sample's own label.
        public: samples and labels to take partners from. Default: another sample of
            the same batch, in a random cycle, so that no sample is its own partner.

    Raises:
        TypeError: if the coefficient is neither a number nor two, ``mix_labels`` no
            truth value, or ``public`` no pair of tensors.
        ValueError: for coefficients outside of (0, 1], no public samples, another
            number of labels than of them, or values that are not finite.

    Example:
        >>> import torch
        >>> from leakwatch import GradientMap
        >>> at = GradientMap(torch.nn.Linear(3, 2), dtype=torch.float64)
        >>> samples = Samples(at, torch.rand(2, 3), torch.tensor([0, 1]))
        >>> made = MixUp(0.75).protect(
        ...     samples.gradient, generator=torch.Generator(), samples=samples)
        >>> made.knowledge.mixing.coefficient.tolist()
        [0.75, 0.75]
    """

    coefficient: float | tuple[float, float] = 0.5
    mix_labels: bool = True
    public: tuple[Float[Tensor, "m ..."], Shaped[Tensor, "m ..."]] | None = None
    name: ClassVar[str] = "mixup"
    needs: ClassVar[Needs] = "samples"
    budget: ClassVar[None] = None

    def __post_init__(self) -> None:
        _ = self._ends
        if not isinstance(self.mix_labels, bool):
            raise TypeError(
                f"mix_labels must be True or False, got a "
                f"{type(self.mix_labels).__name__}; partners go by name, "
                f"public=(samples, labels)."
            )
        if self.public is None:
            return
        pair: object = self.public
        if not isinstance(pair, tuple | list) or [
            isinstance(t, Tensor) for t in pair
        ] != [True, True]:
            raise TypeError(
                f"public must be (samples, labels), two tensors, got a "
                f"{type(pair).__name__}; convert arrays with torch.as_tensor."
            )
        x, y = self.public
        if len(x) != len(y):
            raise ValueError(
                f"public must be (samples, labels) of one length, got "
                f"{len(x)} and {len(y)}."
            )
        if not len(x):
            raise ValueError("public holds no samples, so there are no partners.")
        check_inputs(x)
        if not bool(torch.isfinite(x).all()):
            raise ValueError(
                "public samples hold NaN or infinity, and so would every mixture; "
                "leave such samples out."
            )

    def protect(
        self,
        gradient: Float[Tensor, "n d_theta"],
        *,
        generator: torch.Generator,
        samples: Samples | None = None,
    ) -> Shared:
        """The gradient of each sample's mixture. See :meth:`Defense.protect`.

        Raises:
            ValueError: as there, and if a single sample has no partner, or partners
                are of another shape or no classes of the network's.
        """
        samples = needed(samples, gradient, "MixUp")
        mixing = self._mixing(samples, generator)
        message = mixing.gradient(samples.gradients).to(gradient)
        return Shared.fixed(message, gradient, Knowledge(mixing=mixing))

    @property
    def _ends(self) -> tuple[float, float]:
        alpha: object = self.coefficient
        ends = alpha if isinstance(alpha, tuple | list) else (alpha, alpha)
        if len(ends) != 2 or not all(
            isinstance(end, numbers.Real) and not isinstance(end, bool) for end in ends
        ):
            raise TypeError(
                f"coefficient must be a number or (low, high), got {alpha!r}."
            )
        low, high = float(ends[0]), float(ends[1])
        if not (math.isfinite(low) and 0 <= low <= high <= 1) or high == 0:
            raise ValueError(
                f"coefficient must be in (0, 1], or low and high in [0, 1] with low "
                f"first, got {alpha!r}; 1 mixes nothing."
            )
        return low, high

    def _mixing(self, samples: Samples, generator: torch.Generator) -> Mixing:
        n, device = len(samples), samples.x.device
        low, high = self._ends
        where = generator.device
        if self.public is not None:
            x, y = (t.to(device) for t in self.public)
            _check_partners(samples, x, y)
            chosen = torch.randint(len(x), (n,), generator=generator, device=where)
        elif n == 1:
            raise ValueError(
                "a single sample has nobody to be mixed with; use a larger batch, or "
                "give public samples."
            )
        else:
            x, y = samples.x, samples.y
            order = torch.randperm(n, generator=generator, device=where)
            chosen = torch.empty_like(order)
            chosen[order] = order.roll(1)
        drawn = torch.rand(n, generator=generator, device=where, dtype=torch.float64)
        # From (0, 1]: nothing of the sample would be left, and nothing to divide by.
        alpha = low + (high - low) * (1 - drawn)
        chosen = chosen.to(device)
        return Mixing(
            samples.x,
            samples.y,
            x[chosen],
            y[chosen],
            alpha.to(device),
            self.mix_labels,
        )


def _check_partners(samples: Samples, x: Tensor, y: Tensor) -> None:
    if x.shape[1:] != samples.x.shape[1:]:
        raise ValueError(
            f"public samples must have the shape of the private ones, "
            f"{tuple(samples.x.shape[1:])}, got {tuple(x.shape[1:])}."
        )
    # Labels out of range would make gradients of mixtures NaN.
    ends = torch.stack([y.argmin(), y.argmax()]) if y.ndim == 1 else slice(0, 2)
    try:
        samples.gradients.check(x[ends], y[ends])
    except (TypeError, ValueError) as error:
        raise type(error)(f"public samples: {error}") from error
