"""``run.json``: what a run is, and the hash of every file that belongs to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from leakwatch.reporting.ledger.storage import make_private_directory, write_atomically

SCHEMA_VERSION: Final = 1

_FILES: Final = "files"
_CHECKSUM: Final = "checksum"
# What the monitor writes has four levels.
_DEEPEST: Final = 32


@final
class RunFile:
    """Reads and writes the ``run.json`` of one run directory.

    Args:
        directory: Of the run.
        warn: ``warn(key, sentence)``: what could not be used.
    """

    def __init__(self, directory: Path, warn: Callable[[str, str], None]) -> None:
        self.path = directory / "run.json"
        self._warn = warn
        # What a writer wrote last: a file that was damaged since is not its source.
        self._written: dict[str, Any] | None = None

    def read(self) -> dict[str, Any]:
        """Return all that it says, without the hashes; empty when there is none."""
        content = self._read()
        return {k: v for k, v in content.items() if k not in (_FILES, _CHECKSUM)}

    def files(self) -> dict[str, dict[str, Any]]:
        """Return what is known of each file: ``sha256``, of tables also ``rows``."""
        listed = self._read().get(_FILES)
        if not isinstance(listed, Mapping):
            return {}
        return {k: dict(v) for k, v in listed.items() if isinstance(v, Mapping)}

    def write(self, metadata: Mapping[str, Any], run: str) -> None:
        """Replace all but the hashes; see `RiskLedger.write_metadata`."""
        self._write(
            {
                "schema_version": SCHEMA_VERSION,
                "run": run,
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                **metadata,
                _FILES: self._current().get(_FILES, {}),
            }
        )

    def list(self, entries: Mapping[str, Mapping[str, Any]], run: str) -> None:
        """Add what is known of files, by name.

        Args:
            entries: From `entry_of`, or `files` of another run.
            run: Name of the run, where there is no ``run.json`` yet.
        """
        content = self._current()
        if content:
            self._write({**content, _FILES: {**content.get(_FILES, {}), **entries}})
        else:
            self.write({}, run)
            self.list(entries, run)

    def forget(self, names: Iterable[str]) -> None:
        """Leave files out from now on."""
        content, gone = self._current(), set(names)
        kept = {k: v for k, v in content.get(_FILES, {}).items() if k not in gone}
        if len(kept) < len(content.get(_FILES, {})):
            self._write({**content, _FILES: kept})

    def _current(self) -> dict[str, Any]:
        if self._written is None:
            content = self._read()
            self._written = {**content, _FILES: self.files()} if content else {}
        return self._written

    def _write(self, content: dict[str, Any]) -> None:
        content = {k: v for k, v in content.items() if k != _CHECKSUM}
        plain = json.loads(json.dumps(content, default=_to_json))
        plain[_CHECKSUM] = _checksum(plain)
        text = json.dumps(plain, indent=2, ensure_ascii=False)
        make_private_directory(self.path.parent)
        write_atomically(
            self.path, (text + "\n").encode("utf-8", errors="backslashreplace")
        )
        self._written = plain

    def _read(self) -> dict[str, Any]:
        if not self.path.is_file():
            return {}
        name = str(self.path)
        try:
            content = json.loads(self.path.read_bytes())
            if not isinstance(content, dict):
                raise ValueError(f"it holds {type(content).__name__}, not an object")
            if not _depth_at_most(content, _DEEPEST):
                raise ValueError(f"it is nested more than {_DEEPEST} levels deep")
        except RecursionError:
            self._warn(name, f"{name} is ignored: it is nested too deep")
            return {}
        except (ValueError, OSError) as error:
            self._warn(name, f"{name} is ignored: {error}")
            return {}
        version = content.get("schema_version", SCHEMA_VERSION)
        if isinstance(version, int) and version > SCHEMA_VERSION:
            self._warn(
                name,
                f"{name} has schema version {version}, this leakwatch knows "
                f"{SCHEMA_VERSION}: update leakwatch if something looks wrong",
            )
        elif {_FILES, _CHECKSUM} & content.keys() and (
            content.get(_CHECKSUM) != _checksum(content)
        ):
            self._warn(
                name,
                f"{name} was changed after it was written, by a person or a fault: "
                f"what it says of this run may be wrong",
            )
        return content


def entry_of(data: bytes, *, table: bool = False) -> dict[str, Any]:
    """Return what is kept of a file in ``run.json``.

    Args:
        data: Its bytes.
        table: Whether it is one, with a header and one line for each row.
    """
    entry: dict[str, Any] = {"rows": data.count(b"\n") - 1} if table else {}
    return {**entry, "sha256": hashlib.sha256(data).hexdigest()}


def check_entry(data: bytes, entry: Mapping[str, Any] | None) -> None:
    """Refuse bytes that are not those that were written.

    Args:
        data: As read.
        entry: From ``run.json``; None where it knows nothing, as of the last part
            of a run that was killed.

    Raises:
        ValueError: They are others.
    """
    if entry is not None and entry.get("sha256") != hashlib.sha256(data).hexdigest():
        raise ValueError(
            "it was changed after it was written, its hash is not the one in run.json"
        )


def _checksum(content: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != _CHECKSUM}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _depth_at_most(value: object, depth: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return True
    return depth > 0 and all(_depth_at_most(item, depth - 1) for item in value)


def _to_json(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)
