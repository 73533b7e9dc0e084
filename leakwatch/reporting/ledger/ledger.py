"""The append-only record of a run, on local disk.

Layout of a run directory::

    run.json                 what the run is, what its quantities mean, and the hash
                             of every file below but the report
    ledger/part-000000.csv   one file per probe step
    spectra/part-000000.npz  eigenvalues of that step, where they were kept
    attacks/part-000000.npz  reconstructions of that step: private, never uploaded
    probes.npz               pictures of the probes: private, never uploaded
    replaced/1/              parts that a resumed run measured again, as they were
    report.html              written by `leakwatch.reporting.write_report`
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, final

import numpy as np
import numpy.typing as npt

from leakwatch.notebook import Tabular
from leakwatch.reporting.ledger.dataframe import to_dataframe
from leakwatch.reporting.ledger.rows import Row, decode_rows, encode_rows
from leakwatch.reporting.ledger.run_file import RunFile, check_entry, entry_of
from leakwatch.reporting.ledger.storage import (
    Arrays,
    check_arrays,
    decode_arrays,
    encode_arrays,
    make_private_directory,
    sync_directory,
    write_atomically,
)
from leakwatch.reporting.quantities import (
    LAYERS,
    class_names_from_metadata,
    quantities_from_metadata,
)

if TYPE_CHECKING:
    import pandas as pd

# Directories of arrays that belong to a part.
_BESIDE: Final = ("spectra", "attacks")
_PART: Final = re.compile(r"part-(\d{6,})\.csv")


class LedgerWarning(UserWarning):
    """Something in a run directory could not be used and was left out."""


@final
class RiskLedger(Tabular):
    """Append-only record of (run, epoch, step, sample, class, quantity, value, status).

    Every `append` writes one file and moves it into place: a killed run loses at
    most the probe in flight. Nothing is created before the first write. A
    directory that holds parts already is continued; a fresh run in an old
    directory calls ``truncate(0)`` first.

    Args:
        directory: Run directory, usually ``<trainer.log_dir>/leakwatch-run``.
        run: Name of the run, repeated in each row.

    Attributes:
        directory: The run directory.
        run: Name of the run.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ledger = RiskLedger(folder, run="demo")
        ...     position = ledger.append([Row(0, 0, 7, 1, "i2f_psnr", 21.5)])
        ...     values = [row.value for row in RiskLedger.open(folder).rows()]
        >>> position, values
        (1, [21.5])
    """

    def __init__(self, directory: str | Path, run: str = "") -> None:
        self.directory = Path(directory)
        self.run = run
        self._warned: dict[str, str] = {}
        self._run_file = RunFile(self.directory, self._warn)
        if self.directory.exists() and not self.directory.is_dir():
            raise NotADirectoryError(
                f"{self.directory} is a file; expected a directory for the ledger"
            )
        self._position = max(self._parts(), default=-1) + 1

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """Open a recorded run for reading.

        Raises:
            FileNotFoundError: If ``directory`` holds neither ``run.json`` nor a
                ledger part.
        """
        ledger = cls(directory)
        if not ledger.position and not (ledger.directory / "run.json").is_file():
            raise FileNotFoundError(
                f"no leakwatch run in {ledger.directory}: it has neither run.json nor "
                "ledger/part-*.csv. Give the directory that the monitor wrote, "
                "for example lightning_logs/version_0/leakwatch-run"
            )
        ledger.run = str(ledger.read_metadata().get("run", ""))
        return ledger

    @property
    def position(self) -> int:
        """Number of parts: what a checkpoint stores and `truncate` takes."""
        return self._position

    @property
    def problems(self) -> tuple[str, ...]:
        """What was left out while reading, one sentence each."""
        return tuple(self._warned.values())

    @property
    def damage(self) -> tuple[str, ...]:
        """Of these, by what rows are lost or may be wrong; known after `rows`."""
        return tuple(
            sentence
            for path, sentence in self._warned.items()
            if path == str(self._run_file.path) or _PART.fullmatch(Path(path).name)
        )

    def append(
        self,
        rows: Iterable[Row],
        spectra: Mapping[str, npt.ArrayLike] | None = None,
        attacks: Mapping[str, npt.ArrayLike] | None = None,
    ) -> int:
        """Write the rows of one probe step, and return the new position.

        Args:
            rows: Rows of the step; may be empty.
            spectra: Arrays to keep beside them: ``eigenvalues`` of shape
                (n_samples, k), ``sample`` and ``class`` of shape (n_samples,),
                ``epoch``, ``step``, and optionally ``floor`` of shape
                (n_samples,), the precision below which eigenvalues mean nothing.
            attacks: Reconstructions to keep: ``sample`` and ``class`` of shape
                (n_samples,), ``epoch``, ``step``, ``original`` and one array of
                uint8 pictures per kind of attack. Private, on local disk only.

        Raises:
            ValueError: If a status word is unknown or an array holds objects.
            OSError: If the disk refuses; the ledger is then as before.
        """
        table = encode_rows(rows, self.run)
        beside = {
            kind: None if arrays is None else encode_arrays(arrays)
            for kind, arrays in (("spectra", spectra), ("attacks", attacks))
        }
        make_private_directory(self.directory)
        make_private_directory(self.directory / "ledger")
        while self._part(self._position).exists():
            self._position += 1
        # The CSV part is the commit: arrays go first, and those of a step whose
        # part never came are overwritten or removed by the next append. Hashes come
        # last, so that one part at most is without.
        entries = self._unlisted()
        for kind, content in beside.items():
            path = self._beside(kind, self._position)
            if content is None:
                path.unlink(missing_ok=True)
            else:
                make_private_directory(path.parent)
                write_atomically(path, content)
                entries[self._name(path)] = entry_of(content)
        path = self._part(self._position)
        write_atomically(path, table)
        entries[self._name(path)] = entry_of(table, table=True)
        self._position += 1
        try:
            self._run_file.list(entries, self.run)
        except OSError as error:
            self._warn("hash", f"the hash of {path} is not in run.json: {error}")
        return self._position

    def truncate(self, position: int) -> None:
        """Take back all parts from ``position`` on: resuming redoes those probes.

        They are moved into a numbered folder in ``replaced``.

        Raises:
            ValueError: If ``position`` is negative.
        """
        if position < 0:
            raise ValueError(f"position is {position}, expected 0 or more")
        self._warn_if_short(position, self)
        going = [index for index in self._parts() if index >= position]
        files = [
            path
            for index in sorted(going, reverse=True)
            for path in (self._part(index), *(self._beside(k, index) for k in _BESIDE))
        ]
        # First: a hash without its file would be said to be a loss.
        listed = self._run_file.files()
        self._run_file.forget(name for name in listed if _index_of(name) >= position)
        if going:
            replaced = self._free_folder()
            for path in files:
                target = replaced / path.relative_to(self.directory)
                if path.is_file():
                    make_private_directory(target.parent)
                    os.replace(path, target)
        if (self.directory / "ledger").is_dir():
            for leftover in (self.directory / "ledger").glob(".part-*.tmp"):
                with contextlib.suppress(OSError):
                    leftover.unlink()
            sync_directory(self.directory / "ledger")
        self._position = min(position, self._position)

    def copy_from(self, directory: str | Path, position: int) -> None:
        """Take over the first ``position`` parts of another run directory.

        For a run that resumes into a new log directory. Metadata and pictures
        are not copied: the resumed run writes its own. Copying from the ledger's
        own directory is `truncate`.

        Raises:
            FileNotFoundError: If ``directory`` holds no ledger.
            ValueError: If this ledger holds parts already.
        """
        source = RiskLedger.open(directory)
        if source.directory.resolve() == self.directory.resolve():
            self.truncate(position)
            return
        if self._position:
            raise ValueError(
                f"{self.directory} holds {self._position} parts already; copy into an "
                "empty directory or call truncate(0) first"
            )
        self._warn_if_short(position, source)
        # As they were written: what was damaged since stays known to be.
        listed = source._run_file.files()
        entries = {k: v for k, v in listed.items() if 0 <= _index_of(k) < position}
        for index in sorted(i for i in source._parts() if i < position):
            make_private_directory(self.directory)
            for kind in (*_BESIDE, ""):
                old = source._beside(kind, index) if kind else source._part(index)
                if old.is_file():
                    new = self.directory / old.relative_to(source.directory)
                    make_private_directory(new.parent)
                    write_atomically(new, old.read_bytes())
            self._position = index + 1
        if entries:
            self._run_file.list(entries, self.run)

    def rows(self) -> list[Row]:
        """Return all rows in the order of writing.

        A part that can't be read or is not as it was written is left out, with a
        `LedgerWarning`; one that is missing is named.
        """
        return [row for _, row in self._records()]

    def to_dataframe(self) -> pd.DataFrame:
        """Return all rows as a DataFrame.

        Columns: run, epoch, step, sample, class, quantity, value, status; sample
        and class are nullable integers. ``class_name`` follows when the metadata
        names the classes.

        Raises:
            ModuleNotFoundError: If pandas is not installed.
        """
        names = class_names_from_metadata(self.read_metadata())
        return to_dataframe(self._records(), names)

    def plot(self) -> Any:
        """The run over its training, as the report draws it: a plotly figure.

        Returns:
            None where nothing has been recorded.

        Raises:
            ModuleNotFoundError: If plotly is not installed.
        """
        # By name: figures are built on the ledger, not the ledger on figures.
        figures = importlib.import_module("leakwatch.reporting.figures.risk")
        metadata = self.read_metadata()
        rows = [row for row in self.rows() if not row.quantity.startswith(LAYERS)]
        return figures.risk_over_epochs(
            rows,
            quantities_from_metadata(metadata),
            class_names_from_metadata(metadata),
        )

    def __repr__(self) -> str:
        name = f", run {self.run}" if self.run else ""
        return f"RiskLedger({str(self.directory)!r}{name}: {self.position} parts)"

    def records(self) -> list[dict[str, Any]]:
        """The rows of the last probe step: what a notebook shows."""
        rows = self.rows()
        last = max(((row.epoch, row.step) for row in rows), default=None)
        return [asdict(row) for row in rows if (row.epoch, row.step) == last]

    def spectra(self) -> list[Arrays]:
        """Return the arrays of each step that kept its spectra, oldest first."""
        return self._arrays("spectra")

    def attacks(self) -> list[Arrays]:
        """Return the reconstructions of each step that kept some, oldest first."""
        return self._arrays("attacks")

    def write_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Write ``run.json``; replaces what was there.

        Args:
            metadata: ``class_names``, ``units``, ``data_range``, ``quantities``
                (name to unit, direction, meaning, source), ``config``,
                ``versions``, and whatever else the report should show.
                ``schema_version``, ``run`` and ``created`` (UTC) are filled in
                when absent. Values that JSON doesn't know are written as text.
        """
        self._run_file.write(metadata, self.run)

    def read_metadata(self) -> dict[str, Any]:
        """Return the content of ``run.json``; empty when there is none."""
        return self._run_file.read()

    def write_probes(
        self,
        pixels: npt.NDArray[np.uint8],
        index: npt.ArrayLike,
        label: Iterable[int | None],
    ) -> None:
        """Keep pictures of the probes for the report, on local disk only.

        Args:
            pixels: Shape (n, height, width, channels), uint8.
            index: Data-set indices, shape (n,).
            label: Classes, n of them; kept as -1 where there is none.

        Raises:
            ValueError: If a shape or the type is another.
        """
        pixels = np.asarray(pixels)
        if pixels.dtype != np.uint8 or pixels.ndim != 4:
            raise ValueError(
                f"pixels are {pixels.dtype} of shape {pixels.shape}, expected uint8 of "
                "shape (n, height, width, channels); leave pictures out for other data"
            )
        indices = np.asarray(index, dtype=np.int64)
        classes = [-1 if y is None else int(y) for y in label]
        labels = np.asarray(classes, dtype=np.int64)
        if indices.shape != (len(pixels),) or labels.shape != (len(pixels),):
            raise ValueError(
                f"index has shape {indices.shape} and label {labels.shape}, "
                f"expected ({len(pixels)},) for {len(pixels)} pictures"
            )
        content = encode_arrays({"pixels": pixels, "index": indices, "label": labels})
        make_private_directory(self.directory)
        write_atomically(self.directory / "probes.npz", content)
        self._run_file.list({"probes.npz": entry_of(content)}, self.run)

    def read_probes(self) -> Arrays | None:
        """Return ``pixels``, ``index`` and ``label``, or None without pictures."""
        path = self.directory / "probes.npz"
        if not path.is_file():
            return None
        return self._read_arrays(path, "probes", self._run_file.files())

    def _records(self) -> list[tuple[str, Row]]:
        records: list[tuple[str, Row]] = []
        listed = self._run_file.files()
        found = set(self._parts())
        for index in range(max((*found, *map(_index_of, listed)), default=-1) + 1):
            path = self._part(index)
            entry = listed.get(self._name(path))
            if index not in found:
                self._warn(str(path), f"{path} is missing{_lost(entry)}")
                continue
            try:
                data = path.read_bytes()
                part = decode_rows(data)
                check_entry(data, entry)
                records.extend(part)
            except (ValueError, OSError) as error:
                self._warn(str(path), f"{path} is ignored: {error}{_lost(entry)}")
        return records

    def _unlisted(self) -> dict[str, dict[str, Any]]:
        """Entries of parts that a killed writer could not list any more."""
        listed = self._run_file.files()
        entries = {}
        for index in self._parts():
            for path in (self._part(index), *(self._beside(k, index) for k in _BESIDE)):
                if self._name(path) not in listed and path.is_file():
                    table = path.suffix == ".csv"
                    entries[self._name(path)] = entry_of(path.read_bytes(), table=table)
        return entries

    def _free_folder(self) -> Path:
        number = 1
        while (folder := self.directory / "replaced" / str(number)).exists():
            number += 1
        return folder

    def _name(self, path: Path) -> str:
        return path.relative_to(self.directory).as_posix()

    def _parts(self) -> list[int]:
        directory = self.directory / "ledger"
        if not directory.is_dir():
            return []
        indices: list[int] = []
        for path in directory.iterdir():
            match = _PART.fullmatch(path.name)
            if match and path == self._part(int(match[1])):
                indices.append(int(match[1]))
            elif not (path.name.startswith(".part-") and path.suffix == ".tmp"):
                self._warn(
                    str(path), f"{path} is ignored: it is not a part of the ledger"
                )
        return indices

    def _part(self, index: int) -> Path:
        return self.directory / "ledger" / f"part-{index:06d}.csv"

    def _beside(self, kind: str, index: int) -> Path:
        return self.directory / kind / f"part-{index:06d}.npz"

    def _arrays(self, kind: str) -> list[Arrays]:
        listed = self._run_file.files()
        paths = (self._beside(kind, index) for index in sorted(self._parts()))
        read = (self._read_arrays(p, kind, listed) for p in paths if p.is_file())
        return [arrays for arrays in read if arrays is not None]

    def _read_arrays(
        self, path: Path, kind: str, listed: Mapping[str, Mapping[str, Any]]
    ) -> Arrays | None:
        try:
            data = path.read_bytes()
            arrays = decode_arrays(data)
            check_entry(data, listed.get(self._name(path)))
            check_arrays(kind, arrays)
            return arrays
        except (ValueError, OSError) as error:
            self._warn(str(path), f"{path} is ignored: {error}")
            return None

    def _warn_if_short(self, position: int, source: RiskLedger) -> None:
        if position > source.position:
            self._warn(
                f"short {position}",
                f"the checkpoint knows {position} ledger parts but {source.directory} "
                f"holds {source.position}: earlier probes are missing from the record",
            )

    def _warn(self, key: str, sentence: str) -> None:
        if key not in self._warned:
            self._warned[key] = sentence
            warnings.warn(sentence, LedgerWarning, stacklevel=3)


def _index_of(name: str) -> int:
    """The number of the part that a listed file belongs to; -1 for others."""
    match = re.search(r"/part-(\d{6,})\.", name)
    return int(match[1]) if match else -1


def _lost(entry: Mapping[str, Any] | None) -> str:
    rows = None if entry is None else entry.get("rows")
    return f"; {rows} rows are not shown" if isinstance(rows, int) else ""
