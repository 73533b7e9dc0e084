"""Samples that are watched under one network: how they are measured; no Trainer."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from leakwatch.callbacks._probing.class_weights import LossFactors
from leakwatch.callbacks._probing.distributed import refusing_collectives
from leakwatch.callbacks._probing.observing import observing
from leakwatch.callbacks._probing.preparation import Preparation
from leakwatch.callbacks._probing.step import (
    ProbeStep,
    Share,
    device_of,
    merge_pictures,
    merge_rows,
    merge_spectra,
)
from leakwatch.callbacks._probing.training_gradient import TrainingComparison
from leakwatch.callbacks._probing.training_probes import SampleSource
from leakwatch.callbacks._recording.described import described as in_words
from leakwatch.callbacks._recording.recorder import Recorder, Warn
from leakwatch.callbacks._recording.run_metadata import assumed, describe_run
from leakwatch.derivatives import GradientMap, Prepare, UnsupportedModuleError
from leakwatch.derivatives.losses import WeightedCriterion
from leakwatch.probes import ProbeSet
from leakwatch.reporting import Quantity, Row
from leakwatch.reporting.message import GRADIENT, Message
from leakwatch.scores import ScoreInputs, Scoring
from leakwatch.status import describe_error

# Tangents at once that a forecast times, as far as these seconds allow.
_TANGENTS = 32
_LOOK = 2.0

__all__ = ["ProbeRun", "Probing", "checked_map"]


class Probing(ABC):
    """What is measured of some samples, how, and in which words it is recorded.

    Attributes:
        message: what clients share, in the words of the report.
        name: first part of all log keys.
        report: whether to write a report at the end.
        live: whether to write it during training too.
        logged: what loggers get, ``"summary"`` or ``"all"``.
        log_images: whether pictures may leave this disk.
        log_ledger: whether W&B gets the record as an artifact.
        verbose: whether to say what each step found.
        budget: the share of training that watching may take; ``None``: any.
        foretold: whether the time of a step can be told beforehand, because it only
            scores.
        attacking: seconds that a step may attack for; 0 where it does not attack, or
            where nothing limits it.
        subject: what a command needs to build network and data again; ``None``: they
            come from a program.
    """

    subject: dict[str, Any] | None = None
    message: ClassVar[Message] = GRADIENT
    budget: float | None = None
    foretold: ClassVar[bool] = False
    attacking: float = 0.0
    name: str
    report: bool
    live: bool
    logged: str
    log_images: bool
    log_ledger: bool
    verbose: bool

    @property
    @abstractmethod
    def scoring(self) -> Scoring:
        """How samples are scored: what the arguments say about it."""

    @abstractmethod
    def draw(
        self, source: SampleSource, indices: Sequence[int] | None = None
    ) -> ProbeSet:
        """The samples to watch.

        Args:
            source: the data of the run.
            indices: of the samples that the run watched before, if it goes on.

        Raises:
            TypeError: if there is no map-style data set to draw from.
            ValueError: if its samples can't be probed.
        """

    def preparation(self, source: SampleSource, probes: ProbeSet) -> Preparation:
        """What becomes of probes before the network gets them.

        Args:
            source: the data of the run.
            probes: the samples.

        Returns:
            A function of a batch of inputs, and why it is not all that training does.
        """
        return Preparation()

    def comparison(
        self,
        gradients: GradientMap,
        probes: ProbeSet,
        prepared: Preparation,
        tell: Warn,
        weigh: Callable[[LossFactors], None],
    ) -> TrainingComparison | None:
        """What compares the first steps of training with what is scored.

        Args:
            gradients: what is scored.
            probes: the samples.
            prepared: from :meth:`preparation`.
            tell: told, under a key, what differs.
            weigh: told by how much training multiplies the criterion's losses.

        Returns:
            ``None`` where training shares something else than gradients.
        """
        return None

    def examine(  # noqa: B027 (most measurements refuse nothing)
        self, module: nn.Module, gradients: GradientMap, probes: ProbeSet
    ) -> None:
        """Refuses, before training, what :meth:`measure` could never do.

        Args:
            module: the network.
            gradients: its gradient map.
            probes: all probes.
        """

    @abstractmethod
    def measure(self, step: ProbeStep) -> Share:
        """Measures the part of the probes that this process has; raises no error.

        Args:
            step: what is measured and when. Its module is left as it was.
        """

    def conclude(self, rows: Sequence[Row], epoch: int, step: int) -> list[Row]:
        """What follows from the rows of all processes; the same in each of them."""
        return []

    def sentence(self, rows: Sequence[Row]) -> str | None:
        """The line to print after a step, instead of the default one."""
        return None

    @abstractmethod
    def describe(self) -> dict[str, Quantity]:
        """Unit, direction, meaning and source of each quantity that is recorded."""

    @abstractmethod
    def settled(self) -> dict[str, Any]:
        """The arguments that the record of a run should state."""

    def arguments(self) -> dict[str, Any]:
        """All that changes what is measured; in words by `described`."""
        return {"scoring": self.scoring}


@final
class ProbeRun:
    """Samples that are watched, under one network and the arguments of a callback.

    A callback makes one for each ``fit()``, ``leakwatch audit`` one for a checkpoint:
    both measure and describe the same.

    Args:
        probing: what is measured, and how.
        module: the network, on its device.
        probes: the samples.
        warn: told what went wrong without stopping anything.
        prepare: what becomes of probes before the network gets them, instead of what
            the arguments say about it.

    Attributes:
        probes: as given.
        gradients: the map from a probe to the gradient that it would share.
        settings: noise, prior and pixels that the scores assume.

    Raises:
        TypeError: if the module doesn't give one tensor of logits.
        ValueError: for probes that the module can't take.
        RuntimeError: for a module whose gradient can't be differentiated in the input.
    """

    def __init__(
        self,
        probing: Probing,
        module: nn.Module,
        probes: ProbeSet,
        warn: Warn,
        prepare: Prepare | None = None,
    ) -> None:
        self.probes = probes
        self.settings = probing.scoring.settings(
            tuple(probes.x.shape[1:]),
            prior_std=probes.prior_std,
            measured=probes.prior,
            data_range=probes.data_range,
        )
        self._probing = probing
        self._module = module
        self._warn = warn
        self._hooked = prepare is not None
        scoring = probing.scoring
        if prepare is not None:
            scoring = replace(scoring, prepare=prepare)
        self.gradients = self._unweighted = checked_map(scoring, module, probes)
        self._factors = LossFactors()
        self._try_one_gradient()
        probing.examine(module, self.gradients, probes)

    def weigh(self, factors: LossFactors) -> None:
        """Goes on with the gradient of a loss that training multiplies.

        Args:
            factors: by how much.
        """
        plain = self._unweighted
        self.gradients, self._factors = plain, factors
        if factors:
            self.gradients = plain.with_criterion(
                WeightedCriterion(plain.criterion, factors.common, factors.classes)
            )

    def measure(
        self, epoch: int, step: int, *, rank: int = 0, world_size: int = 1
    ) -> Share:
        """Measures this process's part of the probes; raises no error.

        Args:
            epoch: completed epochs.
            step: optimiser steps taken.
            rank: of this process.
            world_size: number of processes.
        """
        return self._probing.measure(
            ProbeStep(
                self._module,
                self.gradients,
                self.probes,
                self.settings,
                epoch,
                step,
                rank,
                world_size,
            )
        )

    def foreseen(self, world_size: int = 1) -> float:
        """About how many seconds a probe step will take, within a factor of three.

        Those of its tangents, from a few of one sample.

        Args:
            world_size: processes that share the probes.

        Returns:
            The seconds; NaN where they can't be told.
        """
        if not (self._probing.foretold and _finite(self._module)):
            return math.nan
        place, x = device_of(self._module), self.probes.x[:1]
        try:
            with observing(self._module):
                x, y = x.to(place), self.probes.y[:1].to(place)
                inputs = ScoreInputs(self.gradients, x, y)
                chosen = self._probing.scoring.plan(inputs, self.settings)
                directions = chosen.directions(x[0].numel())
                self._tangents(x, y, 1)  # the first finds out how to differentiate
                each = self._tangents(x, y, 1)
                many = min(_TANGENTS, directions, int(_LOOK / each))
                if many > 1:
                    each = self._tangents(x, y, many) / many
        except Exception:  # the step itself says what is wrong
            return math.nan
        return each * directions * -(-len(self.probes) // world_size)

    def _tangents(self, x: Tensor, y: Tensor, many: int) -> float:
        """The seconds that so many tangents of the first sample take."""
        v = torch.ones(many, x[0].numel(), dtype=self.gradients.dtype).to(x.device)
        started = time.perf_counter()
        self.gradients.dense(x[0], y[0], v).sum().item()
        return time.perf_counter() - started

    def rows(self, shares: Sequence[Share], epoch: int, step: int) -> list[Row]:
        """What all processes found out, what follows from it, and the time it took.

        Args:
            shares: of all processes.
            epoch: completed epochs.
            step: optimiser steps taken.
        """
        rows = merge_rows(shares, self.probes.index)
        failed = [row for row in rows if row.status.startswith("failed")]
        if failed:
            self._warn(
                "probe",
                f"{len(failed)} of {len(rows)} values failed at epoch {epoch} and are "
                f"recorded without a number, the first because "
                f"{failed[0].status.removeprefix('failed: ')}",
            )
        try:
            rows += self._probing.conclude(rows, epoch, step)
        except Exception as error:
            self._warn(
                "conclude", f"a step has no conclusions: {describe_error(error)}"
            )
        seconds = max(share.seconds for share in shares)
        return [*rows, Row(epoch, step, None, None, "seconds", seconds)]

    def record(
        self, recorder: Recorder, shares: Sequence[Share], rows: Sequence[Row]
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Adds a step to the record.

        Args:
            recorder: of the run.
            shares: of all processes.
            rows: of the step.

        Returns:
            Its spectra and its pictures, as the ledger keeps them; ``None`` without.
        """
        index, last = self.probes.index, rows[-1]
        spectra = merge_spectra(shares, index, last.epoch, last.step)
        pictures = merge_pictures(shares, index, last.epoch, last.step)
        learned: dict[str, Any] = {}
        if self._factors:
            learned["loss_factors"] = self._factors.state()
        if shares[0].solver:
            learned["solver_used"] = shares[0].solver
        if shares[0].notes:
            learned["notes"] = list(shares[0].notes)
        recorder.append(rows, spectra, pictures, learned)
        return spectra, pictures

    def metadata(
        self, *, defended: bool, defense: object = None, **also: Any
    ) -> dict[str, Any]:
        """What the record of the run states, pictures apart.

        Args:
            defended: whether a defense takes part in training.
            defense: the one, where it is at hand.
            also: further entries of its ``config``.
        """
        described = describe_run(
            self.probes,
            self._probing.describe(),
            self.settings,
            {**self._probing.settled(), **also},
            self._module,
            self._probing.message,
        )
        described["assumed"] = assumed(described["config"], defended=defended)
        described["arguments"] = in_words(
            {
                "class": type(self._probing),
                **self._probing.arguments(),
                "settings": self.settings,
                "probes": self.probes,
                "defense": defense,
                "prepared_as_in_training": self._hooked,
            }
        )
        described["computed"] = {
            "device": str(device_of(self._module)),
            "threads": torch.get_num_threads(),
        }
        if self._probing.subject is not None:
            described["subject"] = self._probing.subject
        return described

    def _try_one_gradient(self) -> None:
        if not _finite(self._module):
            return
        place = device_of(self._module)
        with observing(self._module):
            try:
                self.gradients(self.probes.x[:2].to(place), self.probes.y[:2].to(place))
            except UnsupportedModuleError:
                raise
            except Exception as error:
                self._warn(
                    "gradient", f"a first gradient failed: {describe_error(error)}"
                )


def checked_map(scoring: Scoring, module: nn.Module, probes: ProbeSet) -> GradientMap:
    """The gradient map of a module, after one forward pass of up to two probes.

    Args:
        scoring: whose criterion, parameters and precision apply.
        module: the network.
        probes: the samples.

    Raises:
        TypeError: if the module doesn't give one tensor of logits.
        ValueError: if its logits don't fit the labels of the probes.
        RuntimeError: if its forward exchanges data between processes.
    """
    gradients = scoring.gradient_map(module)
    # A run that has diverged may be resumed; its values are recorded as failed.
    if _finite(module):
        place = device_of(module)
        with observing(module), refusing_collectives(module):
            gradients.check(probes.x.to(place), probes.y.to(place))
    return gradients


def _finite(module: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in module.parameters())
