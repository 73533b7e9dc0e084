"""What audits, presets and combinations expect of an attack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from jaxtyping import Float
from torch import Tensor

from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.result import Reconstruction
from leakwatch.attacks.shared_gradient import SharedGradient
from leakwatch.attacks.start import Start
from leakwatch.derivatives import GradientMap

__all__ = ["Attack", "Progress"]

Progress: TypeAlias = Callable[[int, int, float], None]
"""``progress(done, total, best)``: steps done, steps planned, the median over targets
of the best matching distance so far. An exception that it raises ends the attack."""


class Attack(Protocol):
    """Something that rebuilds samples from what they shared."""

    @property
    def name(self) -> str:
        """The attack's name, recorded in its results."""

    def run(
        self,
        gradients: GradientMap,
        shared: SharedGradient,
        *,
        pixels: PixelScale,
        start: Start,
        seed: int,
        restarts: int,
        time_limit: float | None = None,
        progress: Progress | None = None,
        initial: Float[Tensor, "restarts targets images *sample"] | None = None,
    ) -> Reconstruction:
        """Attacks all targets.

        Args:
            gradients: the map from samples to gradients, known to the attacker.
            shared: what the attacker is given.
            pixels: normalisation and range of the images.
            start: where the attack begins.
            seed: of the random starts; with it a target's result does not depend on
                which other targets are attacked beside it.
            restarts: independent tries for each target, of which the one that matches
                best is returned.
            time_limit: seconds after which the best so far is returned.
            progress: called now and then.
            initial: images to begin from, network-input units, instead of ``start``,
                which then only names where they came from.

        Returns:
            The best images, and what they are worth.
        """
