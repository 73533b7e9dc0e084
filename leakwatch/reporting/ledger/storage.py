"""Files that are either complete or absent, readable by their owner only."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def make_private_directory(directory: Path) -> None:
    """Create a directory, and its parents, that only its owner can read.

    A directory that exists keeps its mode: someone chose it.
    """
    if directory.is_dir():
        return
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` so that ``path`` never holds a part of it.

    The bytes go to a temporary file in the same directory (a rename is atomic
    within one file system only), reach the disk, and then take the name. A kill
    at any moment leaves the old file or the new one. The file's mode is 0o600.

    Raises:
        OSError: If the disk is full or the directory is not writable; the old
            file, if there was one, is untouched.
    """
    handle, name = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"
    )
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make a rename or removal in ``directory`` durable, where that is possible."""
    # Windows cannot open a directory and some network file systems refuse to
    # sync one; the rename itself stays atomic there.
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
