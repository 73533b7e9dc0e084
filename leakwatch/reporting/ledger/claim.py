"""One writer for each run directory, among all processes of a machine."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path
from typing import Final

from leakwatch.reporting.ledger.storage import make_private_directory

LOCK: Final = ".lock"
"""Name of the file that the writer of a directory holds locked."""

_HELD: Final[dict[Path, int]] = {}


def claim(directory: Path) -> bool:
    """Become the only process that writes into a directory, which is made.

    The claim ends with `release` or with the process, however that ends. Child
    processes, such as those of a data loader, don't inherit it. Where the system
    or the file system knows no locks, every claim is granted.

    Args:
        directory: To write into.

    Returns:
        False if another process has claimed it.

    Raises:
        OSError: The disk refuses.
    """
    directory = directory.resolve()
    if directory in _HELD:
        return True
    make_private_directory(directory)
    handle = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(handle)
                return False
    _HELD[directory] = handle
    return True


def release(directory: Path) -> None:
    """Let other processes write into a directory; nothing where it isn't claimed.

    Args:
        directory: As it was claimed.
    """
    handle = _HELD.pop(directory.resolve(), None)
    if handle is not None:
        with contextlib.suppress(OSError):
            os.close(handle)
