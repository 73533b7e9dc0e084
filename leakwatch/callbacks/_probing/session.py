"""What a monitor does during one ``fit()``: probe, record, offer, finish."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from leakwatch.callbacks._probing.distributed import gather
from leakwatch.callbacks._probing.observing import observing
from leakwatch.callbacks._probing.state import Progress
from leakwatch.callbacks._probing.step import (
    Share,
    device_of,
    merge_pictures,
    merge_rows,
    merge_spectra,
)
from leakwatch.callbacks._probing.training_probes import training_probes
from leakwatch.callbacks._recording.loggers import say, warn
from leakwatch.callbacks._recording.recorder import Recorder
from leakwatch.callbacks._recording.run_metadata import (
    Recorded,
    assumed,
    describe_run,
    new_run_name,
    run_directory,
)
from leakwatch.callbacks._recording.summary import scalars_of, sentence, time_rows
from leakwatch.derivatives import GradientMap, UnsupportedModuleError
from leakwatch.probes import ProbeSet
from leakwatch.reporting import RiskLedger, Row
from leakwatch.scores import Settings
from leakwatch.status import describe_error

if TYPE_CHECKING:
    from leakwatch.callbacks.probe_callback import ProbeCallback

__all__ = ["Session", "checked_map"]

# What values rest on; a curve over epochs means something only if these stay.
_ASSUMPTIONS = ("noise_std", "epsilon", "target_psnr")
_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def checked_map(
    monitor: ProbeCallback, module: LightningModule, probes: ProbeSet
) -> GradientMap:
    """The gradient map of a module, after one forward pass of up to two probes.

    Args:
        monitor: whose criterion and precision apply.
        module: the network.
        probes: the samples.

    Returns:
        The map.

    Raises:
        TypeError: if the module doesn't give one tensor of logits.
        ValueError: if its logits don't fit the labels of the probes.
    """
    gradients = GradientMap(
        module,
        monitor.criterion,
        parameters=monitor.parameters,
        dtype=_DTYPES[monitor.dtype],
    )
    # A run that has diverged may be resumed; its values are recorded as failed.
    if _finite(module):
        place = device_of(module)
        with observing(module):
            gradients.check(probes.x.to(place), probes.y.to(place))
    return gradients


def _finite(module: LightningModule) -> bool:
    return all(bool(p.isfinite().all()) for p in module.parameters())


@final
class Session:
    """Everything that lives from the start of training to its end.

    Args:
        monitor: whose arguments apply.
        trainer: at the start of training; every process makes a session.
        module: the network.
        progress: what has happened before; kept up to date.
        natural: where to record if nothing is there yet.

    Raises:
        TypeError: for training data that no probes can be drawn from.
        ValueError: for probes that the module can't take.
        RuntimeError: for a module whose gradient can't be differentiated in the input.
    """

    def __init__(
        self,
        monitor: ProbeCallback,
        trainer: Trainer,
        module: LightningModule,
        progress: Progress,
        natural: Path,
    ) -> None:
        self._monitor = monitor
        self._progress = progress
        self._started = time.perf_counter() - progress.elapsed
        self._warned: set[str] = set()
        self._unoffered = bool(progress.latest)
        self._pictures_due = monitor.log_images
        self.probes = self._drawn(trainer)
        self._settings = Settings(
            noise_std=monitor.noise_std,
            epsilon=monitor.epsilon,
            prior_std=monitor.prior_std or self.probes.prior_std,
            data_range=monitor.data_range or self.probes.data_range,
            target_psnr=monitor.target_psnr,
        )
        self._gradients = self._examined(module)
        monitor.examine(module, self._gradients, self.probes)
        self._recorder = self._opened(trainer, module, natural)

    @property
    def elapsed(self) -> float:
        """Seconds of training so far, those before a checkpoint included."""
        return time.perf_counter() - self._started

    def probe(
        self, trainer: Trainer, module: LightningModule, epoch: int, step: int
    ) -> None:
        """Scores the probes now and records the result; never raises an error.

        Args:
            trainer: the trainer; every process must call this.
            module: the network.
            epoch: completed epochs.
            step: optimiser steps taken.
        """
        started = time.perf_counter()
        share = self._monitor.measure(
            module,
            self._gradients,
            self.probes,
            self._settings,
            epoch=epoch,
            step=step,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )
        share.spent = self._progress.spent + share.seconds
        share.elapsed = self.elapsed
        shares = gather(trainer, share)
        rows = merge_rows(shares, self.probes.index)
        self._warn_of_failures(rows, epoch)
        try:
            rows += self._monitor.conclude(rows, epoch, step)
        except Exception as error:
            self._warn(
                "conclude", f"a step has no conclusions: {describe_error(error)}"
            )
        rows += time_rows(shares, epoch, step)
        try:
            scalars = scalars_of(
                rows, self._monitor.describe(), self.probes, self._monitor.name
            )
        except Exception as error:
            self._warn(
                "summary", f"a probe step has no summary: {describe_error(error)}"
            )
            scalars = dict.fromkeys(self._progress.latest, math.nan)
        self._progress.latest = scalars
        self._unoffered = True
        if self._recorder is not None:
            try:
                self._record(trainer, self._recorder, shares, rows, scalars)
            except Exception as error:
                self._warn(
                    "record", f"recording a step failed: {describe_error(error)}"
                )
        self._progress.spent += time.perf_counter() - started

    def offer(
        self, trainer: Trainer, module: LightningModule, *, on_step: bool, ended: bool
    ) -> None:
        """Gives the latest values to callbacks that monitor them; loggers have them.

        Within an epoch only keys that something monitors: Lightning goes through all
        that was logged again after every batch.

        Args:
            trainer: the trainer.
            module: the network, in a hook that may log.
            on_step: whether that hook belongs to a step or to an epoch.
            ended: whether the epoch has ended.
        """
        if not self._unoffered:
            return
        self._unoffered = False
        if trainer.barebones:  # nothing can be logged then, and nothing listens
            return
        wanted = _monitored(trainer)
        try:
            for key, value in self._progress.latest.items():
                if ended or key in wanted:
                    module.log(
                        key,
                        value,
                        on_step=on_step,
                        on_epoch=not on_step,
                        logger=False,
                        batch_size=1,
                    )
        except Exception as error:
            self._warn(
                "offer", f"its values can't be monitored: {describe_error(error)}"
            )

    def finish(self, trainer: Trainer) -> None:
        """Writes the report about everything recorded so far."""
        self._progress.elapsed = self.elapsed
        if self._recorder is None:
            return
        path = self._recorder.finish(trainer.loggers, report=self._monitor.report)
        if path is not None and self._monitor.verbose:
            say(trainer, f"leakwatch report: {path}")

    # -- at the start ----------------------------------------------------------------

    def _drawn(self, trainer: Trainer) -> ProbeSet:
        monitor, progress = self._monitor, self._progress
        probes = monitor.given
        if isinstance(probes, int):
            probes = training_probes(
                trainer,
                n=probes,
                seed=monitor.seed,
                mean=monitor.mean,
                std=monitor.std,
                data_range=monitor.data_range,
                indices=progress.indices or None,
            )
        fingerprint = probes.fingerprint()
        if progress.fingerprint not in ("", fingerprint):
            self._warn(
                "probes",
                "the probes are not those that the checkpoint was recorded with; "
                "values before and after it are about different samples",
            )
        progress.indices, progress.fingerprint = list(probes.index), fingerprint
        return probes

    def _examined(self, module: LightningModule) -> GradientMap:
        gradients = checked_map(self._monitor, module, self.probes)
        place = device_of(module)
        x, y = self.probes.x.to(place), self.probes.y.to(place)
        if not _finite(module):
            return gradients
        with observing(module):
            try:
                gradients(x[:2], y[:2])
            except UnsupportedModuleError:
                raise
            except Exception as error:
                self._warn(
                    "gradient", f"a first gradient failed: {describe_error(error)}"
                )
        return gradients

    def _opened(
        self, trainer: Trainer, module: LightningModule, natural: Path
    ) -> Recorder | None:
        monitor, progress = self._monitor, self._progress
        past = progress.past
        progress.run = trainer.strategy.broadcast(progress.run or new_run_name())
        directory = run_directory(trainer, natural, past)
        progress.directory = str(directory)
        if not trainer.is_global_zero:
            return None
        described = describe_run(
            self.probes,
            monitor.describe(),
            self._settings,
            monitor.settled(),
            module,
            monitor.message,
        )
        described["assumed"] = assumed(described["config"], defended=_defended(trainer))
        changed = _changed(past, described["config"])
        if changed:
            text = (
                f"values up to step {trainer.global_step} were recorded under other "
                f"assumptions ({changed}) and can't be compared with later ones"
            )
            described["notes"] = [text]
            self._warn("assumptions", text)
        recorder = Recorder(
            directory,
            progress.run,
            past,
            self.probes,
            described,
            monitor.name,
            self._warn,
        )
        progress.directory, progress.position = recorder.directory, recorder.position
        return recorder

    # -- one probe step --------------------------------------------------------------

    def _record(
        self,
        trainer: Trainer,
        recorder: Recorder,
        shares: Sequence[Share],
        rows: Sequence[Row],
        scalars: dict[str, float],
    ) -> None:
        last = rows[-1]
        spectra = merge_spectra(shares, self.probes.index, last.epoch, last.step)
        found: dict[str, Any] = {}
        if shares[0].solver:
            found["solver_used"] = shares[0].solver
        if shares[0].notes:
            found["notes"] = list(shares[0].notes)
        pictures = merge_pictures(shares, self.probes.index, last.epoch, last.step)
        recorder.append(rows, spectra, pictures, found)
        self._progress.position = recorder.position
        recorder.publish(trainer.loggers, rows, scalars, spectra)
        if self._pictures_due:
            self._pictures_due = False
            recorder.publish_pictures(trainer.loggers, step=last.step, epoch=last.epoch)
        if self._monitor.log_images and pictures is not None:
            recorder.publish_attacks(
                trainer.loggers, pictures, step=last.step, epoch=last.epoch
            )
        if self._monitor.verbose:
            text = self._monitor.sentence(rows) or sentence(
                rows, self._monitor.describe(), self._monitor.noise_std
            )
            say(trainer, text)

    def _warn_of_failures(self, rows: Sequence[Row], epoch: int) -> None:
        failed = [row for row in rows if row.status.startswith("failed")]
        if failed:
            self._warn(
                "probe",
                f"{len(failed)} of {len(rows)} values failed at epoch {epoch} and are "
                f"recorded without a number, the first because "
                f"{failed[0].status.removeprefix('failed: ')}",
            )

    def _warn(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warn(text)


def _changed(past: Recorded | None, config: Mapping[str, Any]) -> str:
    """What the run before the checkpoint assumed otherwise, or an empty string."""
    if past is None or not past.position:
        return ""
    try:
        before = RiskLedger.open(past.directory).read_metadata().get("config", {})
    except OSError:
        return ""
    return ", ".join(
        f"{key}={before[key]}, now {config[key]}"
        for key in _ASSUMPTIONS
        if key in before and before[key] != config.get(key)
    )


def _monitored(trainer: Trainer) -> set[str]:
    callbacks: list[Callback] = getattr(trainer, "callbacks", [])
    watchers = [*callbacks, *trainer.lr_scheduler_configs]
    return {str(getattr(watcher, "monitor", None)) for watcher in watchers}


def _defended(trainer: Trainer) -> bool:
    from leakwatch.callbacks.gradient_defense import GradientDefense

    callbacks: list[Callback] = getattr(trainer, "callbacks", [])
    return any(isinstance(c, GradientDefense) for c in callbacks)
