"""Reads the file that an offline W&B run leaves: a log of records, as in LevelDB.

A header of 7 bytes, then blocks of 32 KiB. In them chunks with a header of 7 bytes
(checksum, length, kind); a record is one full chunk, or a first one, middle ones and a
last one. Each record is a protocol buffer.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_BLOCK = 32 * 1024
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(data: bytes) -> Iterator[bytes]:
    """The records of such a file."""
    if len(data) < 7:
        return
    magic, number, version = struct.unpack("<4sHB", data[:7])
    if (magic, number, version) != (b":W&B", 0xBEE1, 0):
        raise ValueError(f"no W&B file: it starts with {data[:7]!r}")
    place, parts = 7, b""
    while place + 7 <= len(data):
        if _BLOCK - place % _BLOCK < 7:  # too little room for a header: padding
            place += _BLOCK - place % _BLOCK
            continue
        checksum, length, kind = struct.unpack("<IHB", data[place : place + 7])
        if kind == 0 and length == 0:  # the zeros at the end of a preallocated file
            break
        body = data[place + 7 : place + 7 + length]
        if len(body) != length:  # still being written
            return
        if checksum != zlib.crc32(bytes([kind]) + body):
            raise ValueError(f"broken chunk of kind {kind} at byte {place}")
        place += 7 + length
        parts = body if kind in (_FULL, _FIRST) else parts + body
        if kind in (_FULL, _LAST):
            yield parts
        elif kind not in (_FIRST, _MIDDLE):
            raise ValueError(f"unknown kind of chunk {kind} at byte {place}")


def history(folder: Path) -> list[dict[str, Any]]:
    """The logged rows of the one offline run below a folder, in order."""
    return [_row(r.history.item) for r in _records(folder) if r.HasField("history")]


@dataclass
class Kept:
    """What else such a run keeps.

    Attributes:
        config: of the run.
        metrics: key → its definition.
        artifacts: type and names of files.
        alerts: their texts.
    """

    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    artifacts: list[tuple[str, set[str]]] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)


def kept(folder: Path) -> Kept:
    """Config, definitions of metrics and artifacts of the one offline run."""
    found = Kept()
    for record in _records(folder):
        if record.HasField("config"):
            found.config |= _row(record.config.update)
        if record.HasField("metric"):
            found.metrics[record.metric.name or record.metric.glob_name] = record.metric
        if record.HasField("alert"):
            found.alerts.append(record.alert.text)
        if record.HasField("artifact"):
            files = {entry.path for entry in record.artifact.manifest.contents}
            found.artifacts.append((record.artifact.type, files))
    return found


def _records(folder: Path, patience: float = 30.0) -> list[Any]:
    """The records of the one offline run below a folder.

    W&B's own process may still be writing when ``wandb.finish()`` returns: the file is
    complete with the record of the run's exit.
    """
    (file,) = sorted(folder.rglob("run-*.wandb"))
    until = time.monotonic() + patience
    while True:
        found = []
        for data in records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            found.append(record)
        kinds = [record.WhichOneof("record_type") for record in found]
        if "exit" in kinds:
            return found
        if time.monotonic() > until:
            raise TimeoutError(f"{file} has no record of the run's exit: {kinds}")
        time.sleep(0.1)


def _row(items: Any) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for item in items:
        *above, key = list(item.nested_key) or [item.key]
        place = row
        for name in above:
            place = place.setdefault(name, {})
        place[key] = json.loads(item.value_json)
    return row


def media(folder: Path, entry: dict[str, Any]) -> Any:
    """The content of a JSON file that a row points to."""
    (path,) = folder.rglob(str(entry["path"]))
    return json.loads(path.read_text())
