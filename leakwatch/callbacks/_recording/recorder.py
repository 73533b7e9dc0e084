"""The record of one run in the main process: ledger, loggers, report."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from lightning.pytorch.loggers import Logger

from leakwatch.callbacks._recording import loggers as publish
from leakwatch.callbacks._recording.pictures import attack_panels, captions, pictures
from leakwatch.callbacks._recording.run_metadata import PastRecord, created, open_ledger
from leakwatch.callbacks._recording.summary import logged
from leakwatch.probes import ProbeSet
from leakwatch.reporting import (
    RiskLedger,
    Row,
    class_bars,
    classes_over_epochs,
    layers_over_epochs,
    quantities_from_metadata,
    risk_over_epochs,
    without_layers,
    write_report,
)
from leakwatch.reporting.ledger.claim import release
from leakwatch.reporting.statistics.scalars import extreme_of

__all__ = ["Recorder", "Warn"]

#: ``warn(key, sentence)``: what went wrong without stopping anything.
Warn: TypeAlias = Callable[[str, str], None]

# Seconds of a training before its report is written for the first time.
_EARLIEST: Final = 20.0
# So many times longer than it took, a report waits before it is written again.
_REST: Final = 100.0


@final
class Recorder:
    """Writes what a monitor finds; nothing that goes wrong here stops training.

    Args:
        directory: of the run.
        run: its name.
        past: the record that it continues.
        probes: the samples watched.
        metadata: of the run.
        prefix: of log keys.
        warn: ``warn(key, sentence)``; one warning for each key.
        log: ``"summary"`` for about ten scalars, ``"all"``.
    """

    def __init__(
        self,
        directory: Path,
        run: str,
        past: PastRecord | None,
        probes: ProbeSet,
        metadata: Mapping[str, Any],
        prefix: str,
        warn: Warn,
        *,
        log: str = "summary",
    ) -> None:
        self._directory = directory
        self._probes = probes
        self._metadata = dict(metadata)
        self._prefix = prefix
        self._warn = warn
        self._log = log
        self._table = publish.GrowingTable(f"{prefix}/samples")
        self._defined: set[str] = set()
        self._refresh_from = time.perf_counter() + _EARLIEST
        self._live = False
        self._ledger: RiskLedger | None = None
        try:
            self._ledger = self._opened(directory, run, past)
        except Exception as error:
            self._warn("ledger", f"nothing can be recorded in {directory}: {error}")

    @property
    def directory(self) -> str:
        """Where the run is recorded; empty if the disk refused."""
        return "" if self._ledger is None else str(self._ledger.directory)

    @property
    def position(self) -> int:
        """Number of parts in the ledger."""
        return 0 if self._ledger is None else self._ledger.position

    def say_beside(self, text: str) -> None:
        """Adds a sentence to those that stand beside the headline of the report."""
        said = self._metadata.get("training", [])
        if self._ledger is None or text in said:
            return
        self._metadata["training"] = [*said, text]
        try:
            self._ledger.write_metadata(self._metadata)
        except Exception as error:
            self._warn("ledger", f"a caution was not recorded: {error}")

    def leave_out(self, epochs: Sequence[int], why: str) -> None:
        """Notes which probe steps did not take place.

        Args:
            epochs: after which they were due, all of them so far.
            why: in words.
        """
        self._metadata["left_out"] = {"epochs": list(epochs), "why": why}
        if self._ledger is None:
            return
        try:
            self._ledger.write_metadata(self._metadata)
        except Exception as error:
            self._warn("ledger", f"a step left out was not recorded: {error}")

    def append(
        self,
        rows: Sequence[Row],
        spectra: Mapping[str, Any] | None,
        attacks: Mapping[str, Any] | None,
        learned: Mapping[str, Any],
    ) -> None:
        """Adds one probe step to the ledger.

        Args:
            rows: of the step.
            spectra: eigenvalues with their samples, or ``None``.
            attacks: reconstructions with their samples, or ``None``.
            learned: what the step adds to the run's metadata.
        """
        if self._ledger is None:
            return
        try:
            self._ledger.append(rows, spectra, attacks)
            if any(self._metadata.get(key) != value for key, value in learned.items()):
                self._metadata |= learned
                self._ledger.write_metadata(self._metadata)
        except Exception as error:
            self._warn("ledger", f"a probe step was not recorded: {error}")

    def publish(
        self,
        loggers: Sequence[Logger],
        rows: Sequence[Row],
        scalars: Mapping[str, float],
        spectra: Mapping[str, Any] | None,
        *,
        probes: bool,
        attacks: Mapping[str, Any] | None,
    ) -> None:
        """Sends one probe step to the loggers.

        Args:
            loggers: of the trainer.
            rows: of the step.
            scalars: key → number.
            spectra: eigenvalues with their samples, or ``None``.
            probes: whether to send the probes themselves, if they are pictures.
            attacks: reconstructions to send beside their originals; ``None``: none.
        """
        prefix, step = self._prefix, rows[-1].step
        axes = self._axes(rows)
        shown_scalars = logged(scalars, prefix, self._log)
        refused = self._define(loggers, shown_scalars)
        refused += publish.publish_scalars(
            loggers, {**shown_scalars, **axes}, step=step
        )
        refused += self._table.publish(
            loggers,
            without_layers(rows),
            self._probes.class_names,
            quantities_from_metadata(self._metadata),
            axes=axes,
        )
        if self._log == "all" and spectra is not None:
            refused += publish.publish_spectrum(
                loggers,
                spectra["eigenvalues"],
                axes=axes,
                step=step,
                key=f"{prefix}-detail/spectrum",
            )
        shown = {}
        if probes:
            shown["probes"] = pictures(self._probes), captions(self._probes)
        if attacks is not None:
            shown["reconstructions"] = attack_panels(attacks, self._probes)
        for key, (images, words) in shown.items():
            if images is not None:
                refused += publish.publish_pictures(
                    loggers, images, words, axes=axes, key=f"{prefix}/{key}"
                )
        self._refused(refused)

    def refresh(self) -> Path | None:
        """Writes the report while training goes on, where that costs next to nothing.

        The first failure is the last one: the report at the end says what it was.

        Returns:
            The report's path, the first time that it was written.
        """
        started = time.perf_counter()
        if self._ledger is None or started < self._refresh_from:
            return None
        self._refresh_from = math.inf
        try:
            path = write_report(self._ledger.directory, live=True)
        except Exception as error:
            self._warn("live", f"its report can't be written during training: {error}")
            return None
        ended = time.perf_counter()
        self._refresh_from = ended + _REST * (ended - started)
        first, self._live = not self._live, True
        return path if first else None

    def finish(
        self,
        loggers: Sequence[Logger],
        *,
        report: bool,
        ledger: bool = False,
        pictures: bool = False,
    ) -> Path | None:
        """Sends figures to the loggers that hold them and writes the report.

        Another process may write into the directory afterwards.

        Args:
            loggers: of the trainer.
            report: whether to write it.
            ledger: whether loggers that can hold it get the record itself.
            pictures: whether that may hold pictures of samples.

        Returns:
            The report's path, if there is one.
        """
        try:
            if self._ledger is None or not self._ledger.position:
                return None
            self._draw(self._ledger.rows(), loggers)
            written = write_report(self._ledger.directory) if report else None
            if ledger:
                self._refused(
                    publish.publish_ledger(
                        loggers,
                        self._ledger.directory,
                        name=f"{self._prefix}-ledger-{self._ledger.run}",
                        pictures=pictures,
                    )
                )
            return written
        except Exception as error:
            self._warn(
                "report",
                f"there is no report of {self._directory}, only its ledger: {error}",
            )
        finally:
            release(self._directory)
        return None

    def _draw(self, rows: Sequence[Row], loggers: Sequence[Logger]) -> None:
        if not rows or not any(publish.has_figures(logger) for logger in loggers):
            return
        quantities = quantities_from_metadata(self._metadata)
        names = self._probes.class_names
        of_samples = without_layers(rows)
        figures = {
            "risk": risk_over_epochs(of_samples, quantities, names),
            "classes": class_bars(of_samples, quantities, names),
            "classes_over_epochs": classes_over_epochs(of_samples, names),
            "layers": layers_over_epochs(rows),
        }
        self._refused(
            publish.publish_figures(
                loggers,
                figures,
                axes=self._axes(rows),
                prefix=self._prefix,
            )
        )

    def _opened(self, directory: Path, run: str, past: PastRecord | None) -> RiskLedger:
        lost = ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                ledger = open_ledger(directory, run, past)
            except FileNotFoundError as error:
                lost = str(error)
                ledger = RiskLedger(directory, run=run)
            since = created(past)
        if lost:
            self._warn("past", f"the record before the checkpoint is lost: {lost}")
        elif caught:
            said = "; ".join(str(warning.message) for warning in caught)
            self._warn("past", f"the record before the checkpoint has faults: {said}")
        if since is not None:
            self._metadata["created"] = since
        ledger.write_metadata(self._metadata)
        if "created" not in self._metadata:
            self._metadata["created"] = ledger.read_metadata()["created"]
        shown = pictures(self._probes)
        if shown is not None:
            ledger.write_probes(shown, self._probes.index, self._probes.labels)
        return ledger

    def _axes(self, rows: Sequence[Row]) -> dict[str, int]:
        epoch, step = rows[-1].epoch, rows[-1].step
        return {f"{self._prefix}/epoch": epoch, f"{self._prefix}/step": step}

    def _define(self, loggers: Sequence[Logger], keys: Iterable[str]) -> list[str]:
        """Announces what has not been sent before."""
        new = [key for key in keys if key not in self._defined]
        quantities = quantities_from_metadata(self._metadata)
        refused: list[str] = []
        if not self._defined:
            known = {k: v for k, v in self._metadata.items() if k != "quantities"}
            refused += publish.state(loggers, known, prefix=self._prefix)
        self._defined.update(new)
        extremes = {key: extreme_of(key, quantities, self._prefix) for key in new}
        return refused + publish.define(loggers, extremes, prefix=self._prefix)

    def _refused(self, sentences: Sequence[str]) -> None:
        if sentences:
            said = "; ".join(dict.fromkeys(sentences))
            self._warn("loggers", f"a logger refused values: {said}")
