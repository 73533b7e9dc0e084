"""Other processes that write into run directories."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CLAIM = """
import sys
from pathlib import Path
from leakwatch.reporting.ledger.claim import claim
print(claim(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@contextmanager
def writer_of(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that claims a directory and holds it, until killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CLAIM, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "True\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
