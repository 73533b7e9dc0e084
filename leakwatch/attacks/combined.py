"""A first-order attack to come near, Gauss–Newton to arrive."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.attacks.first_order import FirstOrder
from leakwatch.attacks.gauss_newton import GaussNewton
from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.priors import Priors
from leakwatch.attacks.protocol import Progress
from leakwatch.attacks.result import Reconstruction
from leakwatch.attacks.sharing import SharedGradient
from leakwatch.attacks.starts import Start
from leakwatch.gradients import GradientMap

__all__ = ["Combined"]


@final
@dataclass(frozen=True)
class Combined:
    """Runs a first-order attack and begins Gauss–Newton at its images.

    Of each target that which matches better is returned: where Gauss–Newton ends in a
    worse place than it began, nothing is lost.

    Args:
        name: recorded in results.
        first: comes near.
        second: arrives.
        share: part of the time limit that ``first`` may use, in (0, 1).

    Raises:
        ValueError: for a share outside of (0, 1).
    """

    name: str = "combined"
    first: FirstOrder = field(
        default_factory=lambda: FirstOrder(
            name="cosine", steps=600, lr=0.1, priors=Priors(tv=1e-3)
        )
    )
    second: GaussNewton = field(default_factory=GaussNewton)
    share: float = 0.4

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share must lie in (0, 1), got {self.share}.")

    def run(
        self,
        gradients: GradientMap,
        shared: SharedGradient,
        *,
        pixels: PixelScale,
        start: Start,
        seed: int = 0,
        restarts: int = 1,
        time_limit: float | None = None,
        progress: Progress | None = None,
        initial: Float[Tensor, "restarts targets images ..."] | None = None,
    ) -> Reconstruction:
        """Attacks all targets. See :class:`leakwatch.attacks.protocol.Attack`."""
        began = time.perf_counter()
        near = self.first.run(
            gradients,
            shared,
            pixels=pixels,
            start=start,
            seed=seed,
            restarts=restarts,
            time_limit=None if time_limit is None else self.share * time_limit,
            progress=progress,
            initial=initial,
        )
        # The best restart first: targets that it solves need no other.
        order = near.restart_loss.argsort(0)
        every = torch.arange(shared.targets, device=order.device)
        left = None
        if time_limit is not None:
            left = max(time_limit - (time.perf_counter() - began), 1e-3)
        known = (
            shared
            if shared.labels is not None
            else replace(shared, labels=near.labels.view(shared.targets, shared.images))
        )
        found = self.second.run(
            gradients,
            known,
            pixels=pixels,
            start=start,
            seed=seed,
            restarts=restarts,
            time_limit=left,
            progress=progress,
            initial=near.restart_images[order, every],
        )
        better = found.relative <= near.relative

        def pick(a: Tensor, b: Tensor) -> Tensor:
            return torch.where(better.view(-1, *[1] * (a.ndim - 1)), a, b.to(a))

        return replace(
            found,
            images=pick(found.images, near.images),
            loss=pick(found.loss, near.loss),
            relative=pick(found.relative, near.relative),
            status=tuple(
                a if kept else b
                for a, b, kept in zip(
                    found.status, near.status, better.tolist(), strict=True
                )
            ),
            iterations=found.iterations + near.iterations,
            seconds=time.perf_counter() - began,
            attack=self.name,
        )

    def changed(self, **changes: object) -> Combined:
        """The same attack with other settings.

        Args:
            changes: of this class; others go to the second attack.

        Raises:
            ValueError: for a setting that neither has.

        Example:
            >>> Combined().changed(share=0.5, steps=10).second.steps
            10
        """
        own = {f.name for f in fields(self)}
        mine = {k: v for k, v in changes.items() if k in own}
        rest = {k: v for k, v in changes.items() if k not in own}
        changed: Combined = replace(self, **mine)  # type: ignore[arg-type]
        return replace(changed, second=changed.second.changed(**rest))
