"""What all attacks have in common, and how to add one.

An attack is a frozen dataclass whose fields are its settings. It says how to search;
:class:`GradientAttack` does the rest: limits, labels, starts, the verdict, the result.
A new attack is one file with its class and one line that registers it:

    >>> from dataclasses import dataclass
    >>> import torch
    >>> from leakwatch.attacks import GradientAttack, Preset, SearchResult
    >>> from leakwatch.attacks import attack, register_attack
    >>> @dataclass(frozen=True)
    ... class BestGuess(GradientAttack):
    ...     '''The random image whose gradient is nearest.'''
    ...
    ...     name: str = "best-guess"
    ...     steps: int = 50
    ...
    ...     def search(self, task):
    ...         best = task.first_images()
    ...         loss = task.mismatch(best)
    ...         for step in range(1, self.steps + 1):
    ...             guess = task.first_images(draw=step)
    ...             mismatch = task.mismatch(guess)
    ...             better = mismatch < loss
    ...             loss = torch.where(better, mismatch, loss)
    ...             best[better] = guess[better]
    ...             task.report(step, self.steps, loss)
    ...         return SearchResult(best, loss, torch.full_like(loss, step).long())
    >>> preset = register_attack(Preset(BestGuess(), source="this page"))

From now on callbacks, command line and configurations find it by its name:

    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(9, 3))
    >>> x, y = torch.rand(2, 1, 3, 3), torch.tensor([0, 2])
    >>> result = attack(net, x, y, "best-guess", steps=5, data_range=1.0)
    >>> result.images.shape, result.attack
    (torch.Size([2, 1, 3, 3]), 'best-guess')

Attacks on weight updates are added alike, see :mod:`leakwatch.attacks.updates`, and so
are generators, see :mod:`leakwatch.attacks.generators`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self, TypeAlias, final

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from leakwatch.attacks.labels.infer import LabelMethod, infer_labels
from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.result import Reconstruction
from leakwatch.attacks.shared_gradient import SharedGradient
from leakwatch.attacks.start import Start
from leakwatch.attacks.verdict import mismatch, uninformed, verdict
from leakwatch.checks import check_integer, check_number
from leakwatch.derivatives import GradientMap
from leakwatch.names import meant
from leakwatch.priors import GaussianPrior
from leakwatch.status import Status

__all__ = [
    "Attack",
    "AttackTask",
    "BaseAttack",
    "GradientAttack",
    "GradientTask",
    "Progress",
    "ProgressLine",
    "SearchResult",
    "check_arguments",
    "doubts_about",
    "following",
    "refuse_unknown",
]

Progress: TypeAlias = Callable[[int, int, float], None]
"""``progress(done, total, best)``: steps done, steps planned, the median over targets
of the best matching distance so far. An exception that it raises ends the attack."""

_WIDTH = 78


class Attack(Protocol):
    """Something that rebuilds samples from what they shared.

    :class:`GradientAttack` is the easy way to be one.
    """

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
        """Attacks all targets, see :meth:`GradientAttack.run`."""


# -- one run ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class AttackTask(ABC):
    """What one run of an attack is given, and its limits.

    Attributes:
        gradients: the map from samples to gradients, known to the attacker.
        labels: known, or inferred, ``(targets, images)``.
        pixels: normalisation and range of the images.
        start: where the attack begins.
        seed: of the random starts.
        restarts: independent tries for each target.
        deadline: ``time.perf_counter()`` at which to stop, ``None`` for no limit.
        progress: told now and then.
        initial: images to begin from instead of ``start``, network-input units.
    """

    gradients: GradientMap
    labels: Shaped[Tensor, "targets images ..."]
    pixels: PixelScale
    start: Start
    seed: int
    restarts: int
    deadline: float | None = None
    progress: Progress | None = None
    initial: Float[Tensor, "restarts targets images ..."] | None = None

    @property
    @abstractmethod
    def size(self) -> tuple[int, int, tuple[int, ...]]:
        """Targets, images of each, and the shape of a sample."""

    @property
    @abstractmethod
    def names(self) -> tuple[int, ...]:
        """What names each target's random stream."""

    @property
    def device(self) -> torch.device:
        """That of the network."""
        return next(self.gradients.module.parameters()).device

    @property
    def over(self) -> bool:
        """Whether the time is."""
        return self.deadline is not None and time.perf_counter() > self.deadline

    def first_images(
        self,
        *,
        box: bool = True,
        sets: int = 1,
        draw: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Float[Tensor, "restarts targets images ..."]:
        """Where the attacks begin, network-input units.

        Args:
            box: whether within the range of pixels, where that is known.
            sets: images for each sample.
            draw: other numbers for other draws.
            dtype: default that of the gradients.
            device: default that of the network.

        Returns:
            Images that nobody else holds.

        Raises:
            ValueError: for images to begin from that have another shape or are not
                finite, and as :meth:`leakwatch.attacks.Start.draw` does.
        """
        targets, images, shape = self.size
        dtype = self.gradients.dtype if dtype is None else dtype
        device = self.device if device is None else device
        size = (self.restarts, targets, sets * images, *shape)
        initial = self.initial
        if initial is None:
            x = self.start.draw(
                targets=targets,
                images=sets * images,
                shape=shape,
                restarts=self.restarts,
                seed=self.seed + draw,
                pixels=self.pixels,
                index=self.names,
                dtype=dtype,
                device=device,
            )
        elif tuple(initial.shape) == size and bool(torch.isfinite(initial).all()):
            x = initial.detach().to(device, dtype, copy=True)
        else:
            raise ValueError(
                f"initial must be finite images of shape (restarts, targets, images, "
                f"*sample) = {size}, got {tuple(initial.shape)}."
            )
        return self.pixels.clamp(x) if box else x

    def report(
        self, done: int, total: int, loss: Float[Tensor, "restarts targets"]
    ) -> None:
        """Tells who waits how far the attack has come.

        Args:
            done: steps done.
            total: steps planned.
            loss: the best matching distances so far.
        """
        if self.progress is not None:
            self.progress(done, total, float(loss.amin(0).median()))


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class GradientTask(AttackTask):
    """One run of an attack on gradients.

    Attributes:
        shared: what the attacker is given. Its own labels may be unknown; those to work
            with are ``labels``.
    """

    shared: SharedGradient

    @property
    def size(self) -> tuple[int, int, tuple[int, ...]]:
        """Targets, images of each, and the shape of a sample."""
        return self.shared.targets, self.shared.images, self.shared.sample_shape

    @property
    def names(self) -> tuple[int, ...]:
        """What names each target's random stream."""
        return self.shared.index or tuple(range(self.shared.targets))

    @property
    def places(self) -> list[tuple[int, int]]:
        """(name of the target's stream, restart) of each attack, restart by restart."""
        return [(name, r) for r in range(self.restarts) for name in self.names]

    @property
    def targets(self) -> Int[Tensor, " attacks"]:
        """The target of each attack, restart by restart."""
        every = torch.arange(self.shared.targets, device=self.device)
        return every.repeat(self.restarts)

    def tick(
        self, total: int, before: int = 0
    ) -> Callable[[int, Float[Tensor, " attacks"]], None]:
        """Reports steps of a phase.

        Args:
            total: steps of all phases together.
            before: those of phases before this one.

        Returns:
            Takes the steps done in the phase and the best losses of all attacks.
        """

        def report(step: int, loss: Tensor) -> None:
            self.report(before + step, total, loss.view(-1, self.shared.targets))

        return report

    def mismatch(
        self, images: Float[Tensor, "restarts targets images ..."]
    ) -> Float[Tensor, "restarts targets"]:
        """‖g − g*‖/‖g*‖ of images, float64; see `leakwatch.attacks.verdict`."""
        each = (mismatch(self.gradients, self.shared, x, self.labels) for x in images)
        return torch.stack([relative for relative, _ in each])


@final
@dataclass(frozen=True, eq=False)
class SearchResult:
    """What each restart came to.

    Attributes:
        images: the best that it met, network-input units, finite.
        loss: matching distance there, without priors; infinite where none was finite.
        steps: of the optimiser.
        rank: restarts are compared by it, the least wins. Default: ``loss``.
        labels: where they are other than those of the task.
        late: which the clock stopped. Default: none.
        diverged: which were given up. Default: none.
        history: loss of the current images at evenly spaced steps, where recorded.
        alpha: of attacks on updates, see
            :class:`leakwatch.attacks.UpdateReconstruction`. Default: NaN.
        uninformed: of attacks on updates, the loss of images that know nothing.
            Default: 1, that of an unrelated direction.
    """

    images: Float[Tensor, "restarts targets images ..."]
    loss: Float[Tensor, "restarts targets"]
    steps: Int[Tensor, "restarts targets"]
    rank: Float[Tensor, "restarts targets"] | None = None
    labels: Int[Tensor, "restarts targets images"] | None = None
    late: Bool[Tensor, "restarts targets"] | None = None
    diverged: Bool[Tensor, "restarts targets"] | None = None
    history: Float[Tensor, "checks restarts targets"] | None = None
    alpha: Float[Tensor, "restarts targets"] | None = None
    uninformed: Float[Tensor, " targets"] | None = None

    def best_of(self, t: Float[Tensor, "restarts targets ..."]) -> Tensor:
        """The rows of the best restarts, ``(targets, ...)``."""
        rank = self.loss if self.rank is None else self.rank
        best = rank.argmin(0).to(t.device)
        return t[best, torch.arange(t.shape[1], device=t.device)]

    def all_restarts(self, flags: Bool[Tensor, "restarts targets"] | None) -> Tensor:
        """Whether it is so of all restarts, ``(targets,)``; never where not known."""
        if flags is None:
            return torch.zeros_like(self.loss[0], dtype=torch.bool)
        return flags.all(0)


# -- attacks ---------------------------------------------------------------------------


@dataclass(frozen=True)
class BaseAttack:
    """An attack and its settings, the fields of the dataclass.

    Args:
        name: recorded in results; as a preset it is asked for by it.
    """

    name: str = dataclasses.field(default="", kw_only=True)

    only_normal_start: ClassVar[bool] = False
    """Whether the attack can't begin at images: it has random latents of its own."""

    def changed(self, **settings: object) -> Self:
        """The same attack with other settings.

        Args:
            settings: names and new values.

        Returns:
            A new attack.

        Raises:
            ValueError: for a setting that there isn't; lists those that there are.
        """
        refuse_unknown(self.name, settings, self.setting_names())
        return dataclasses.replace(self, **settings)  # type: ignore[arg-type]

    @classmethod
    def setting_names(cls) -> list[str]:
        """What :meth:`changed` can change."""
        return [field.name for field in dataclasses.fields(cls)]

    def check(self, module: nn.Module) -> None:
        """Raises for a network that the attack can't work on. None by default.

        Raises:
            ValueError: says why, and which attack to use instead.
        """

    def fit_to(
        self,
        sample_shape: tuple[int, ...],
        *,
        prior_std: float,
        prior_mean: Float[Tensor, "*sample"] | None,
        prior: GaussianPrior | None = None,
    ) -> Self:
        """The attack with those defaults that fit the samples. Itself by default.

        Args:
            sample_shape: of one sample.
            prior_std: of pixels around their mean.
            prior_mean: that mean, pixels.
            prior: instead of both.
        """
        return self

    def _begin(
        self, restarts: int, time_limit: float | None, start: Start, initial: object
    ) -> float | None:
        """The deadline, after a look at limits and start."""
        check_integer("restarts", restarts, example=3)
        if time_limit is not None:
            check_number("time_limit", time_limit, example=60.0)
        if self.only_normal_start and (start.name != "normal" or initial is not None):
            what = f"start {start.name!r}" if initial is None else "images of yours"
            raise ValueError(
                f"{self.name} begins with random latents and generators, not at "
                f"{what}; use Start.normal()."
            )
        return None if time_limit is None else time.perf_counter() + time_limit


@dataclass(frozen=True)
class GradientAttack(BaseAttack, ABC):
    """An attack on shared gradients; see the module for an example."""

    @abstractmethod
    def search(self, task: GradientTask) -> SearchResult:
        """Looks for images, for all targets and restarts.

        Args:
            task: what is given, and the limits.

        Returns:
            The best images of each restart.
        """

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

        Raises:
            ValueError: if the shared gradients are not this module's, the attack can't
                work on it, ``initial`` has another shape, or a limit is not positive.
        """
        began = time.perf_counter()
        deadline = self._begin(restarts, time_limit, start, initial)
        if shared.gradient.shape[1] != gradients.size:
            raise ValueError(
                f"the shared gradients have {shared.gradient.shape[1]} entries, but "
                f"the module shares {gradients.size}; was another model, or a frozen "
                f"part, used? Share the gradients of the same module."
            )
        self.check(gradients.module)
        labels, doubts = self.labels_of(shared, gradients)
        task = GradientTask(
            gradients=gradients,
            shared=shared,
            labels=labels,
            pixels=pixels,
            start=start,
            seed=seed,
            restarts=restarts,
            deadline=deadline,
            progress=progress,
            initial=initial,
        )
        result = self.search(task)
        device = task.device
        restart_images = result.images.to(device, gradients.dtype)
        images = result.best_of(restart_images)
        if result.labels is not None:
            labels = result.best_of(result.labels)
        labels = labels.to(device)
        # Cosine attacks match the direction of the gradient only.
        direction_only = getattr(self, "distance", None) == "cosine"
        rests = mismatch(gradients, shared, images, labels)
        bases = uninformed(gradients, shared, labels, pixels)
        single = shared.images == 1
        return Reconstruction(
            images=images[:, 0] if single else images,
            labels=labels[:, 0] if single else labels,
            loss=result.best_of(result.loss).to(device),
            relative=rests[0],
            status=verdict(
                shared,
                rests[direction_only],
                base=bases[direction_only],
                whole=rests[0],
                out_of_time=result.all_restarts(result.late),
                diverged=result.all_restarts(result.diverged),
                doubts=doubts,
            ),
            iterations=result.best_of(result.steps).to(device),
            restart_images=restart_images,
            restart_loss=result.loss.to(device),
            seconds=time.perf_counter() - began,
            attack=self.name,
            start=start.name,
            practical=start.practical,
            history=result.history,
        )

    def labels_of(
        self, shared: SharedGradient, gradients: GradientMap
    ) -> tuple[Shaped[Tensor, "targets images ..."], tuple[str, ...]]:
        """Labels to work with, and what may be wrong with those of each target.

        Known ones, or else inferred.
        """
        return labels_of(shared, gradients)


def labels_of(
    shared: SharedGradient, gradients: GradientMap, method: LabelMethod = "auto"
) -> tuple[Shaped[Tensor, "targets images ..."], tuple[str, ...]]:
    """Labels that are known, or else inferred, and what may be wrong with them.

    Args:
        shared: what the attacker is given.
        gradients: the map.
        method: see :func:`leakwatch.attacks.labels.infer.infer_labels`.
    """
    if shared.labels is not None:
        return shared.labels, ("",) * shared.targets
    inferred = infer_labels(shared, gradients, method)
    return inferred.labels, doubts_about(inferred.status, "inferred")


def doubts_about(statuses: Iterable[Status], made: str) -> tuple[str, ...]:
    """What may be wrong with labels that were not given, empty for nothing.

    Args:
        statuses: of each target's labels.
        made: how they came about.
    """
    return tuple(
        "" if s.word == "ok" else f"The labels were {made}: {s}." for s in statuses
    )


def refuse_unknown(attack: str, asked: Iterable[str], settings: Iterable[str]) -> None:
    """Raises for settings that an attack does not have.

    Args:
        attack: its name.
        asked: names of the settings that are to be changed.
        settings: names of those that there are.

    Raises:
        ValueError: for a setting that there isn't; lists those that there are.

    Example:
        >>> refuse_unknown("dlg", ["steps"], ["steps", "lr"])
    """
    settings = sorted(settings)
    unknown = sorted(set(asked).difference(settings))
    if unknown:
        raise ValueError(
            f"unknown setting {', '.join(unknown)} of attack {attack!r}; "
            f"{meant(unknown[0], settings)}choose from "
            f"{', '.join(settings)}."
        )


@final
class ProgressLine:
    """One line on stderr that is written over; see the ``progress`` of an attack.

    Args:
        title: what the line begins with.
    """

    def __init__(self, title: str = "attack") -> None:
        self._title = title
        self._written = False

    def __call__(self, done: int, total: int, best: float) -> None:
        """Writes the line; a :data:`Progress`."""
        distance = f"{best:.3g}" if math.isfinite(best) else "none yet"
        text = f"{self._title}: step {done}/{total}, best distance {distance} (median)"
        print(f"\r{text:<{_WIDTH}}", end="", file=sys.stderr, flush=True)
        self._written = True

    def end(self) -> None:
        """Leaves the line."""
        if self._written:
            print(file=sys.stderr)
            self._written = False


@contextmanager
def following(
    progress: bool | Progress, title: str = "attack"
) -> Iterator[Progress | None]:
    """What an attack is to tell how far it has come.

    Args:
        progress: ``True`` for a line on stderr, or a callable.
        title: what the line begins with.

    Yields:
        The callable, ``None`` for ``False``. The line ends with the context.
    """
    if not isinstance(progress, bool):
        yield progress
        return
    line = ProgressLine(title)
    try:
        yield line if progress else None
    finally:
        line.end()


def check_arguments(seed: int, restarts: int | None, progress: bool | Progress) -> int:
    """Looks at what all attacks in one call take.

    Args:
        seed: in [0, 2**63).
        restarts: at least 1, ``None`` for the preset's.
        progress: see :func:`following`.

    Returns:
        The seed as a Python integer.

    Raises:
        TypeError: for another kind of value.
        ValueError: for a number out of range.
    """
    if restarts is not None:
        check_integer("restarts", restarts, example=3)
    seed = check_integer("seed", seed, smallest=0, example=0)
    if seed >= 2**63:
        raise ValueError(f"seed must be in [0, 2**63), got {seed}.")
    if not isinstance(progress, bool) and not callable(progress):
        raise TypeError(
            f"progress must be True, False or a function of (done, total, best), got "
            f"{progress!r}."
        )
    return seed
