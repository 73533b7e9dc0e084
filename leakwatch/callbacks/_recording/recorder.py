"""The record of one run in the main process: ledger, loggers, report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

from lightning.pytorch.loggers import Logger

from leakwatch.callbacks._recording import loggers as publish
from leakwatch.callbacks._recording.pictures import attack_panels, captions, pictures
from leakwatch.callbacks._recording.run_metadata import PastRecord, created, open_ledger
from leakwatch.probes import ProbeSet
from leakwatch.reporting import (
    RiskLedger,
    Row,
    class_bars,
    layers_over_epochs,
    quantities_from_metadata,
    risk_over_epochs,
    without_layers,
    write_report,
)
from leakwatch.reporting.ledger.claim import release

__all__ = ["Recorder", "Warn"]

#: ``warn(key, sentence)``: what went wrong without stopping anything.
Warn: TypeAlias = Callable[[str, str], None]


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
    ) -> None:
        self._directory = directory
        self._probes = probes
        self._metadata = dict(metadata)
        self._prefix = prefix
        self._warn = warn
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
        about = {"step": rows[-1].step, "epoch": rows[-1].epoch}
        names, prefix = self._probes.class_names, self._prefix
        refused = publish.publish_scalars(loggers, scalars, **about)
        refused += publish.publish_step(
            loggers,
            without_layers(rows),
            None if spectra is None else spectra["eigenvalues"],
            class_names=names,
            prefix=prefix,
            **about,
        )
        shown = {}
        if probes:
            shown["probes"] = pictures(self._probes), captions(self._probes)
        if attacks is not None:
            shown["reconstructions"] = attack_panels(attacks, self._probes)
        for key, (images, words) in shown.items():
            if images is not None:
                refused += publish.publish_pictures(
                    loggers, images, words, key=key, prefix=prefix, **about
                )
        self._refused(refused)

    def finish(self, loggers: Sequence[Logger], *, report: bool) -> Path | None:
        """Sends figures to the loggers that hold them and writes the report.

        Another process may write into the directory afterwards.

        Args:
            loggers: of the trainer.
            report: whether to write it.

        Returns:
            The report's path, if there is one.
        """
        try:
            if self._ledger is None or not self._ledger.position:
                return None
            self._draw(self._ledger.rows(), loggers)
            return write_report(self._ledger.directory) if report else None
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
            "layers": layers_over_epochs(rows),
        }
        self._refused(
            publish.publish_figures(
                loggers,
                figures,
                step=rows[-1].step,
                epoch=rows[-1].epoch,
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
            ledger.write_probes(shown, self._probes.index, self._probes.y.numpy())
        return ledger

    def _refused(self, sentences: Sequence[str]) -> None:
        if sentences:
            self._warn("loggers", f"a logger refused values: {'; '.join(sentences)}")
