"""Several images for each target, and what they are compared by."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.attacks.base import SearchResult

__all__ = ["Tries"]


@final
@dataclass(frozen=True, eq=False)
class Tries:
    """What attacks came to, try by try.

    Attributes:
        images: network-input units.
        relative: ‖g − g*‖/‖g*‖ there.
        turned: the same of the directions.
        unlikely: the least is likeliest; infinite where there was no try.
        way: by which attack.
    """

    images: Float[Tensor, "tries targets images ..."]
    relative: Float[Tensor, "tries targets"]
    turned: Float[Tensor, "tries targets"]
    unlikely: Float[Tensor, "tries targets"]
    way: Int[Tensor, "tries targets"]

    def of(self, targets: Int[Tensor, " some"]) -> Tries:
        """Those of some targets."""
        return Tries(*(t[:, targets.to(t.device)] for t in vars(self).values()))

    def sorted_by(self, rank: Float[Tensor, "tries targets"]) -> Tries:
        """The least first, for each target."""
        order = rank.argsort(dim=0, stable=True)
        every = torch.arange(order.shape[1], device=order.device)
        return Tries(
            *(t[order.to(t.device), every.to(t.device)] for t in vars(self).values())
        )

    def with_new(self, found: Tries, targets: Int[Tensor, " some"]) -> Tries:
        """With one try more, of some targets.

        Args:
            found: that try, of these targets.
            targets: their positions.
        """
        made = {}
        for name in (field.name for field in fields(self)):
            before = getattr(self, name)
            fill = {"images": 0, "way": -1}.get(name, math.inf)
            new = torch.full_like(before[:1], fill)
            new[0, targets.to(new.device)] = getattr(found, name)[0].to(new)
            made[name] = torch.cat([before, new])
        return Tries(**made)

    def followed_by(self, others: Tries) -> Tries:
        """These first, then others of the same targets."""
        pairs = zip(vars(self).values(), vars(others).values(), strict=True)
        return Tries(*(torch.cat([a, b.to(a)]) for a, b in pairs))

    def into(
        self, result: SearchResult, lengths: Float[Tensor, " targets"], lost: Tensor
    ) -> SearchResult:
        """A result with these tries, in their order, for targets that are lost.

        Args:
            result: of all targets.
            lengths: ‖g*‖ of the lost ones.
            lost: their positions.
        """
        restarts = len(result.loss)
        images, loss = result.images.clone(), result.loss.clone()
        rank = (result.loss if result.rank is None else result.rank).clone()
        half = 0.5 * (self.relative * lengths.to(self.relative)).square()
        at = lost.to(images.device)
        images[:, at] = self.images[:restarts].to(images)
        loss[:, lost] = half[:restarts].to(loss)
        # The order stands; what has no number comes last.
        place = torch.arange(restarts, device=rank.device, dtype=rank.dtype)
        rank[:, lost] = place[:, None].expand(-1, len(lost))
        return replace(result, images=images, loss=loss, rank=rank)
