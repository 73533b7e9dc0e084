"""What a monitor does during one ``fit()``: probe, record, offer, finish."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from lightning.pytorch import Callback, LightningModule, Trainer

from leakwatch.callbacks._probing.class_weights import LossFactors
from leakwatch.callbacks._probing.cost import advice, affordable, forecast
from leakwatch.callbacks._probing.distributed import gather
from leakwatch.callbacks._probing.run import ProbeRun, Probing
from leakwatch.callbacks._probing.schedule import last_epoch
from leakwatch.callbacks._probing.state import Progress
from leakwatch.callbacks._probing.step import Share
from leakwatch.callbacks._probing.training_probes import SampleSource
from leakwatch.callbacks._recording.bars import shown
from leakwatch.callbacks._recording.loggers import say, warn
from leakwatch.callbacks._recording.recorder import Recorder
from leakwatch.callbacks._recording.run_metadata import (
    PastRecord,
    new_run_name,
    run_directory,
)
from leakwatch.callbacks._recording.summary import (
    logged,
    scalars_of,
    sentence,
    time_fraction,
)
from leakwatch.probes import ProbeSet
from leakwatch.reporting import RiskLedger, Row
from leakwatch.scores.measure.plan import SMALLEST_DASHBOARD
from leakwatch.status import describe_error

__all__ = ["ProbeSession"]

# Seconds of a probe step that are told beforehand.
_LONG = 30.0
# What values rest on; a curve over epochs means something only if these stay.
_ASSUMPTIONS = ("noise_std", "epsilon", "target_psnr")


@final
class ProbeSession:
    """Everything that lives from the start of training to its end.

    Args:
        probing: what is measured.
        trainer: at the start of training; every process makes a session.
        module: the network.
        progress: what has happened before; kept up to date.
        natural: where to record if nothing is there yet.
        defense: the one that takes part in training.

    Attributes:
        probes: the samples watched.
        rows: of the last probe step; empty before the first.

    Raises:
        TypeError: for training data that no probes can be drawn from.
        ValueError: for probes that the module can't take.
        RuntimeError: for a module whose gradient can't be differentiated in the input.
    """

    def __init__(
        self,
        probing: Probing,
        trainer: Trainer,
        module: LightningModule,
        progress: Progress,
        natural: Path,
        *,
        defense: object,
    ) -> None:
        self._probing = probing
        self._progress = progress
        self._started = time.perf_counter() - progress.elapsed
        self._warned: set[str] = set()
        self._unoffered = bool(progress.latest)
        began = time.perf_counter()
        self._forecast = not progress.position
        self.rows: list[Row] = []
        self._pictures_due = probing.log_images
        self._recorder: Recorder | None = None
        source = SampleSource.of(trainer)
        self.probes = self._drawn(source)
        prepared = probing.preparation(source, self.probes)
        self._run = ProbeRun(probing, module, self.probes, self._warn, prepared.prepare)
        self.comparison = probing.comparison(
            self._run.gradients, self.probes, prepared, self._tell, self._weigh
        )
        self._run.weigh(LossFactors.from_state(progress.factors))
        self._recorder = self._opened(trainer, natural, defense)
        if self._recorder is not None and progress.left_out:
            self._recorder.leave_out(progress.left_out, self._too_dear)
        self._say_units(trainer)
        self._foretell(trainer)
        progress.spent += time.perf_counter() - began

    @property
    def elapsed(self) -> float:
        """Seconds of training so far, those before a checkpoint included."""
        return time.perf_counter() - self._started

    def affords(self, trainer: Trainer, epoch: int) -> bool:
        """Whether the budget allows a probe step now; notes where it does not.

        Args:
            trainer: the trainer; every process must call this.
            epoch: completed epochs.
        """
        progress, budget = self._progress, self._probing.budget
        if budget is None:
            return True
        mine = affordable(budget, progress.spent, self.elapsed, progress.cost)
        if trainer.strategy.broadcast(mine):
            return True
        progress.left_out.append(epoch)
        if self._recorder is not None:
            self._recorder.leave_out(progress.left_out, self._too_dear)
        if self._probing.verbose:
            share = 100 * progress.spent / self.elapsed
            say(
                trainer,
                f"leakwatch epoch {epoch}: not probed, watching has taken {share:.0f} "
                f"% of training and a step takes {progress.cost:.1f} s; "
                f"{self._too_dear}",
            )
        return False

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
        title = f"{self._probing.name}, epoch {epoch}"
        probing = self._probing
        with shown(
            trainer,
            title,
            lambda text: say(trainer, text),
            lines=probing.verbose,
            limit=probing.attacking,
        ):
            share = self._run.measure(
                epoch, step, rank=trainer.global_rank, world_size=trainer.world_size
            )
        share.spent = self._progress.spent + share.seconds
        share.elapsed = self.elapsed
        shares = gather(trainer, share)
        rows = self._run.rows(shares, epoch, step)
        rows.append(time_fraction(shares[0].spent, shares[0].elapsed, epoch, step))
        try:
            scalars = scalars_of(
                rows, self._probing.describe(), self.probes, self._probing.name
            )
        except Exception as error:
            self._warn(
                "summary", f"a probe step has no summary: {describe_error(error)}"
            )
            scalars = dict.fromkeys(self._progress.latest, math.nan)
        self._progress.latest, self.rows = scalars, rows
        self._unoffered = True
        if self._recorder is not None:
            try:
                self._record(trainer, self._recorder, shares, rows, scalars)
            except Exception as error:
                self._warn(
                    "record", f"recording a step failed: {describe_error(error)}"
                )
        self._progress.cost = time.perf_counter() - started
        self._progress.spent += self._progress.cost
        if self.comparison is not None:
            self.comparison.probed()
        self._say_cost(trainer, epoch)

    def offer(
        self, trainer: Trainer, module: LightningModule, *, on_step: bool, ended: bool
    ) -> None:
        """Gives the latest values to callbacks that monitor them; loggers have them.

        The keys that loggers get, and any that something monitors. Within an epoch the
        latter alone: Lightning goes through all that was logged again after every
        batch.

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
        probing, latest = self._probing, self._progress.latest
        wanted = _monitored(trainer)
        if ended:
            wanted |= logged(latest, probing.name, probing.logged).keys()
        try:
            for key, value in latest.items():
                if key in wanted:
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

    def broke_off(self, trainer: Trainer, exception: BaseException) -> None:
        """Says in the report that training did not end by itself.

        Args:
            trainer: the trainer.
            exception: what ended it, of which the kind alone is told.
        """
        how = f"broke off with {type(exception).__name__}"
        if isinstance(exception, KeyboardInterrupt):
            how = "was interrupted"
        if self._recorder is not None:
            self._recorder.say_beside(
                f"training {how} in epoch {trainer.current_epoch + 1}, after step "
                f"{trainer.global_step}: nothing later is recorded"
            )

    def finish(self, trainer: Trainer) -> None:
        """Writes the report about everything recorded so far."""
        self._progress.elapsed = self.elapsed
        if self.comparison is not None:
            self.comparison.finish()
        if self._recorder is None:
            return
        path = self._recorder.finish(
            trainer.loggers,
            report=self._probing.report,
            ledger=self._probing.log_ledger,
            pictures=self._probing.log_images,
        )
        if path is not None and self._probing.verbose:
            say(trainer, f"leakwatch report: {path}")

    # -- at the start ----------------------------------------------------------------

    def _drawn(self, source: SampleSource) -> ProbeSet:
        progress = self._progress
        probes = self._probing.draw(source, progress.indices or None)
        fingerprint = probes.fingerprint()
        if progress.fingerprint not in ("", fingerprint):
            self._warn(
                "probes",
                "the probes are not those that the checkpoint was recorded with; "
                "values before and after it are about different samples",
            )
        progress.indices, progress.fingerprint = list(probes.index), fingerprint
        return probes

    def _opened(
        self, trainer: Trainer, natural: Path, defense: object
    ) -> Recorder | None:
        progress = self._progress
        past = progress.past
        progress.run = trainer.strategy.broadcast(progress.run or new_run_name())
        directory = run_directory(trainer, natural, past)
        progress.directory = str(directory)
        if not trainer.is_global_zero:
            return None
        described = self._run.metadata(defended=defense is not None, defense=defense)
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
            self._probing.name,
            self._warn,
            log=self._probing.logged,
        )
        progress.directory, progress.position = recorder.directory, recorder.position
        return recorder

    # -- what it costs --------------------------------------------------------------

    @property
    def _too_dear(self) -> str:
        return f"budget={self._probing.budget} allows no more"

    def _say_units(self, trainer: Trainer) -> None:
        """Says that pixels are not known, so that a weaker attacker is assumed."""
        if self.probes.units == "pixel":
            return
        low, high = float(self.probes.x.min()), float(self.probes.x.max())
        text = (
            f"inputs lie between {low:.3g} and {high:.3g}, so their pixels are not "
            "known: PSNR is that of inputs, and attackers who know the range of "
            "pixels, who are stronger, are not considered; give mean= and std= of the "
            "normalisation"
        )
        if self._probing.verbose:
            say(trainer, f"{self._probing.name}: {text}")
        if self._recorder is not None:
            self._recorder.say_beside(text)

    def _foretell(self, trainer: Trainer) -> None:
        seconds, probing = self._run.foreseen(trainer.world_size), self._probing
        if not probing.verbose:
            return
        if seconds > _LONG:
            say(
                trainer,
                f"leakwatch: a probe step of {len(self.probes)} probes will take about "
                f"{seconds:.0f} s",
            )
        if probing.attacking > _LONG:
            say(
                trainer,
                f"{probing.name}: each audit may attack for {probing.attacking:.0f} s "
                "(time_limit), after it has scored its samples",
            )

    def _say_cost(self, trainer: Trainer, epoch: int) -> None:
        """What the first step took, and later once what would be cheaper."""
        probing, progress = self._probing, self._progress
        every = getattr(probing, "every_n_epochs", 0)
        if not (probing.foretold and probing.verbose and every):
            return
        probes = len(self.probes)
        if self._forecast:
            self._forecast = False
            text = forecast(progress.cost, probes, every, last_epoch(trainer))
        elif "cost" not in self._warned:
            text = advice(
                progress.cost,
                progress.spent,
                self.elapsed,
                epoch,
                every,
                probes,
                last_epoch(trainer),
                cheaper=self.probes.x[0].numel() > SMALLEST_DASHBOARD
                and getattr(probing, "precision", "") != "dashboard",
            )
            if text:
                self._warned.add("cost")
        else:
            return
        if text:
            say(trainer, f"leakwatch: {text}")

    # -- one probe step --------------------------------------------------------------

    def _record(
        self,
        trainer: Trainer,
        recorder: Recorder,
        shares: Sequence[Share],
        rows: Sequence[Row],
        scalars: dict[str, float],
    ) -> None:
        spectra, pictures = self._run.record(recorder, shares, rows)
        self._progress.position = recorder.position
        due, self._pictures_due = self._pictures_due, False
        recorder.publish(
            trainer.loggers,
            rows,
            scalars,
            spectra,
            probes=due,
            attacks=pictures if self._probing.log_images else None,
        )
        if self._probing.verbose:
            text = self._probing.sentence(rows) or sentence(
                rows,
                self._probing.describe(),
                self._run.settings.noise_std,
                self._run.settings.knows,
            )
            say(trainer, text)
        if self._probing.report and self._probing.live:
            path = recorder.refresh()
            if path is not None and self._probing.verbose:
                say(trainer, f"leakwatch report, new after probe steps: {path}")

    def _tell(self, key: str, text: str) -> None:
        """Warns, and says it beside the headline."""
        self._warn(key, text)
        if self._recorder is not None:
            self._recorder.say_beside(text)

    def _weigh(self, factors: LossFactors) -> None:
        self._run.weigh(factors)
        self._progress.factors = factors.state()

    def _warn(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warn(text, self._probing.name)


def _changed(past: PastRecord | None, config: Mapping[str, Any]) -> str:
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
