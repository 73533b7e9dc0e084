"""Where attacks begin."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, final, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.attacks.pixels import PixelScale
from leakwatch.checks import check_number
from leakwatch.names import unknown

__all__ = ["Start", "StartKind", "stream"]

StartKind: TypeAlias = Literal["normal", "uniform", "zeros", "near"]


def stream(seed: int, *place: int) -> torch.Generator:
    """A random stream of its own for one place, such as (target, restart).

    Args:
        seed: of the whole attack.
        place: integers that name the place.

    Returns:
        A CPU generator. Streams of different places or seeds are unrelated.
    """
    digest = hashlib.sha256(repr((int(seed), *map(int, place))).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@final
class Start:
    """Where an attack begins. Made by one of the class methods.

    Every target and restart draws from a stream of its own, named by the seed, the
    target's index and the restart: what else is attacked changes nothing.

    Attributes:
        name: ``"normal"``, ``"uniform"``, ``"zeros"`` or ``"near"``.
        practical: whether an attacker could start there; ``False`` for ``near``, which
            needs the truth and belongs to a worst-case audit.
        radius: distance per element of a near start, network-input units.

    Example:
        >>> import torch
        >>> truth = torch.zeros(2, 1, 2, 2)
        >>> near = Start.near(truth, radius=0.1)
        >>> drawn = near.draw(targets=2, images=1, shape=(1, 2, 2), restarts=3)
        >>> drawn.shape, near.practical
        (torch.Size([3, 2, 1, 1, 2, 2]), False)
        >>> bool((drawn.abs() - 0.1).abs().max() < 1e-7)
        True
    """

    def __init__(
        self,
        name: StartKind,
        truth: Float[Tensor, "n ..."] | None = None,
        radius: float = 0.0,
    ) -> None:
        if name not in get_args(StartKind):
            raise ValueError(unknown("start", name, get_args(StartKind)))
        if (name == "near") != (truth is not None):
            raise ValueError(
                f"start {name!r} {'needs' if name == 'near' else 'takes no'} true "
                f"samples; write Start.near(x, radius=0.1) or Start.normal()."
            )
        check_number("radius", radius, "[0, inf)", example=0.1)
        self.name: StartKind = name
        self.radius = radius
        self._truth = None if truth is None else truth.detach()

    @classmethod
    def normal(cls) -> Start:
        """N(0, 1) for each element, in network-input units (Zhu et al. 2019)."""
        return cls("normal")

    @classmethod
    def uniform(cls) -> Start:
        """Uniform over the range of pixels; over [0, 1] input units if unknown."""
        return cls("uniform")

    @classmethod
    def zeros(cls) -> Start:
        """Zero in network-input units: the mean colour for normalised images."""
        return cls("zeros")

    @classmethod
    def near(cls, truth: Float[Tensor, "n ..."], radius: float = 0.1) -> Start:
        """x* + radius · sign(N), the local study of LAVP (appendix, Table 4).

        Args:
            truth: the true samples, network-input units, all targets' in order.
            radius: distance of every element from the truth, network-input units.

        Returns:
            A start for a worst-case audit.
        """
        return cls("near", truth, radius)

    @property
    def practical(self) -> bool:
        """Whether an attacker could start there."""
        return self.name != "near"

    def draw(
        self,
        *,
        targets: int,
        images: int,
        shape: tuple[int, ...],
        restarts: int = 1,
        seed: int = 0,
        pixels: PixelScale | None = None,
        index: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Float[Tensor, "restarts targets images ..."]:
        """First images of all attacks.

        Args:
            targets: number of targets.
            images: images in each target.
            shape: shape of one sample.
            restarts: tries per target.
            seed: of the attack.
            pixels: range of the images, for ``uniform``.
            index: what names each target's stream. Default: its position.
            dtype: of the result. The numbers drawn don't depend on it.
            device: of the result. Numbers are drawn on the CPU whatever it is.

        Returns:
            Network inputs, ``(restarts, targets, images, *shape)``.

        Raises:
            ValueError: if the true samples of a near start are too few or too many,
                or of another shape; or the index has another length.
        """
        names = range(targets) if index is None else index
        if len(names) != targets:
            raise ValueError(
                f"index must name each of the {targets} targets, got {len(names)}."
            )
        size = (images, *shape)
        if self._truth is not None and self._truth.numel() != targets * math.prod(size):
            raise ValueError(
                f"a near start needs the true samples of all targets, {targets} × "
                f"{size}, got {tuple(self._truth.shape)}."
            )
        out = torch.zeros(restarts, targets, *size, dtype=torch.float64)
        if self.name != "zeros":
            random = torch.rand if self.name == "uniform" else torch.randn
            for r in range(restarts):
                for t, name in enumerate(names):
                    own = stream(seed, name, r)
                    out[r, t] = random(size, dtype=torch.float64, generator=own)
        bounds = None if pixels is None else pixels.box(out)
        if self.name == "uniform" and bounds is not None:
            out = bounds[0] + out * (bounds[1] - bounds[0])
        if self._truth is not None:
            truth = self._truth.to("cpu", torch.float64).reshape(targets, *size)
            out = truth + self.radius * out.sign()
        return out.to(device=device, dtype=dtype)

    def __repr__(self) -> str:
        return f"Start.{self.name}({f'radius={self.radius}' if self.radius else ''})"
