"""What an attack returns: images together with how well they match."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, final

from jaxtyping import Float, Int, Shaped
from torch import Tensor

from leakwatch.notebook import Tabular, pictures
from leakwatch.status import Status

__all__ = ["Reconstruction", "UpdateReconstruction"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Reconstruction(Tabular):
    """Reconstructed samples, detached, on the device of the gradients.

    Attributes:
        images: of the best restart, network-input units: ``(targets, *sample)`` for
            single attacks, ``(targets, images, *sample)`` for joint ones. Always
            finite.
        labels: used or inferred, ``(targets,)`` or ``(targets, images)``.
        loss: the matching distance that the best restart reached, without priors,
            float64; infinite where no restart had a finite one.
        relative: ‖g(x) − g*‖/‖g*‖ at ``images``, float64: the same measure for every
            attack, whatever it minimised.
        status: per target. ``ok``: the gradient was matched, which doesn't promise the
            right image: another may have the same gradient, and a stronger attack may
            find it. ``estimated``: matched under a doubt that the reason states, such
            as inferred labels. ``not converged``: it was not matched, or the time was
            over; the reason says what failed. ``failed``: an error. None of them says
            that a sample is safe.
        iterations: optimiser steps used by the best restart.
        restart_images: of each restart, always with the dimension of images:
            ``(restarts, targets, images, *sample)``; its first ones where the time was
            over before it began.
        restart_loss: its matching distance, float64; infinite there.
        seconds: wall-clock time of the whole attack.
        attack: name of the preset or attack.
        start: name of the start: ``"normal"``, ``"near"``, …
        practical: whether the start is one that an attacker can have; ``False`` for
            starts near the truth, which belong to the worst case.
        history: matching distance of the current images over time, at checks that are
            evenly spaced over the planned steps; the last value known is repeated for
            attacks that had ended. ``None`` when not recorded.
    """

    images: Float[Tensor, "targets ..."]
    labels: Shaped[Tensor, "targets ..."]
    loss: Float[Tensor, " targets"]
    relative: Float[Tensor, " targets"]
    status: tuple[Status, ...]
    iterations: Int[Tensor, " targets"]
    restart_images: Float[Tensor, "restarts targets images ..."]
    restart_loss: Float[Tensor, "restarts targets"]
    seconds: float
    attack: str
    start: str
    practical: bool = True
    history: Float[Tensor, "checks restarts targets"] | None = None

    def __repr__(self) -> str:
        words = Counter(status.word for status in self.status)
        said = ", ".join(f"{count} {word}" for word, count in words.items())
        return f"Reconstruction({self.attack}, {self.start} start: {said})"

    def records(self) -> list[dict[str, Any]]:
        """One row for each target: how well it was matched, and what that is worth."""
        return [
            {
                "target": i,
                "label": self.labels[i].tolist(),
                "loss": float(self.loss[i]),
                "relative": float(self.relative[i]),
                "iterations": int(self.iterations[i]),
                "status": str(status),
            }
            for i, status in enumerate(self.status)
        ]

    def plot(
        self, originals: Float[Tensor, "targets ..."] | None = None, most: int = 10
    ) -> Any:
        """The images, below the originals if they are given: a plotly figure.

        Args:
            originals: network inputs, shaped as ``images``; they set black and white.
            most: how many targets to show.

        Raises:
            ValueError: for samples that are neither grey nor RGB images, and for
                originals of another shape.
            ModuleNotFoundError: plotly is not installed.
        """
        return _drawn(self.images, self.status, originals, most)

    @property
    def best_restart(self) -> Int[Tensor, " targets"]:
        """Which restart was returned, by its matching distance."""
        return self.restart_loss.argmin(0)

    @property
    def matched(self) -> tuple[bool, ...]:
        """Per target, whether the gradient was matched, also under a doubt."""
        return tuple(s.usable for s in self.status)


@final
@dataclass(frozen=True, eq=False, repr=False)
class UpdateReconstruction(Tabular):
    """Reconstructed samples of federated clients, detached.

    An update says nothing about the order of a client's samples: align images with
    the originals before comparing, see :func:`leakwatch.quality.assignment.align`.

    Attributes:
        images: of each client's best restart, network-input units. Always finite.
        labels: used or inferred; ``labels[c, i]`` is the class of ``images[c, i]``.
        loss: distance between the client's update and the one that these images
            explain, without priors, float64, infinite where none was finite: 1 − cos
            for ``ig-update`` and ``sme``; for ``dlfa`` also 1 − cos, of the whole
            simulated update.
        alpha: where between w_T (0) and w_0 (1) the weights lie at which the gradient
            was taken; 1 for ``ig-update``, NaN for ``dlfa``, which uses all the way.
        status: per client. ``ok``: the update was matched, which doesn't promise the
            right images: others may explain it too. ``estimated``: matched under a
            doubt that the reason states, such as inferred labels. ``not converged``: it
            was not matched, or the time was over. None of them says that a client is
            safe.
        restart_images: of each restart.
        restart_loss: its distance.
        restart_alpha: its α.
        iterations: steps of the optimiser in the whole run.
        seconds: wall-clock time of the whole attack on all clients.
        attack: name of the preset or attack.
        history: distance of the current images at evenly spaced steps.
    """

    images: Float[Tensor, "clients N ..."]
    labels: Int[Tensor, "clients N"]
    loss: Float[Tensor, " clients"]
    alpha: Float[Tensor, " clients"]
    status: tuple[Status, ...]
    restart_images: Float[Tensor, "restarts clients N ..."]
    restart_loss: Float[Tensor, "restarts clients"]
    restart_alpha: Float[Tensor, "restarts clients"]
    iterations: int
    seconds: float
    attack: str
    history: Float[Tensor, "checks restarts clients"]

    def __repr__(self) -> str:
        words = Counter(status.word for status in self.status)
        said = ", ".join(f"{count} {word}" for word, count in words.items())
        return f"UpdateReconstruction({self.attack}: {said})"

    def records(self) -> list[dict[str, Any]]:
        """One row for each client: how well its update was matched."""
        return [
            {
                "client": i,
                "labels": self.labels[i].tolist(),
                "loss": float(self.loss[i]),
                "alpha": float(self.alpha[i]),
                "status": str(status),
            }
            for i, status in enumerate(self.status)
        ]

    def plot(self, client: int = 0, most: int = 10) -> Any:
        """The images of one client: a plotly figure.

        Args:
            client: which.
            most: how many samples to show.

        Raises:
            ValueError: for samples that are neither grey nor RGB images.
            ModuleNotFoundError: plotly is not installed.
        """
        images = self.images[client]
        return _drawn(images, (self.status[client],) * len(images), None, most)

    @property
    def best_restart(self) -> Int[Tensor, " clients"]:
        """Which restart was returned, by its distance."""
        return self.restart_loss.argmin(0)


def _drawn(
    images: Tensor, status: tuple[Status, ...], originals: Tensor | None, most: int
) -> Any:
    if originals is not None and originals.shape != images.shape:
        raise ValueError(
            f"originals have shape {tuple(originals.shape)}, expected that of the "
            f"images: {tuple(images.shape)}."
        )
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(
            f"only grey or RGB images can be drawn, (targets, 1 or 3, height, width); "
            f"these are {tuple(images.shape)}."
        )
    scale = images if originals is None else originals
    low = scale.amin((0, 2, 3), keepdim=True)
    span = (scale.amax((0, 2, 3), keepdim=True) - low).clamp_min(1e-12)

    def shown(x: Tensor) -> list[Any]:
        grey = ((x[:most] - low) / span).clamp(0, 1).mul(255).round()
        whole = grey.expand(-1, 3, -1, -1).permute(0, 2, 3, 1)
        return [image.byte().cpu().numpy() for image in whole]

    rows = {} if originals is None else {"original": shown(originals)}
    rows["rebuilt"] = shown(images)
    words = [f"{i}: {s.word}" for i, s in enumerate(status[:most])]
    return pictures(rows, words)
