"""``leakwatch report``: report.html again, from what was recorded."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Final, TextIO

from leakwatch.reporting import write_report

#: What RUN is, for the help of every command that takes one.
RUN: Final = (
    "the folder that holds run.json, such as lightning_logs/version_0/leakwatch-run, "
    "or the folder above it"
)


def report(argv: list[str]) -> None:
    """Rebuild the report of a run and print its path.

    Args:
        argv: Command line after ``leakwatch report``.

    Raises:
        argparse.ArgumentError: RUN is a file.
        FileNotFoundError: There is no run, or more than one.
    """
    parser = argparse.ArgumentParser(
        prog="leakwatch report",
        description="Rebuild report.html from a recorded run and print its path.",
    )
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument(
        "--shared",
        action="store_true",
        help="put plotly.js into a file beside the report, which is small then",
    )
    asked = parser.parse_args(argv)
    print(write_report(take_run(asked.run), shared=asked.shared))


def take_run(
    directory: str | Path, word: str = "taken", file: TextIO | None = None
) -> Path:
    """Find the run in a directory, and say which one it is where there are others.

    Args:
        directory: As in `find_run`.
        word: What is done with it.
        file: Where to say so; None: standard error, apart from what a command prints.

    Raises:
        argparse.ArgumentError: As in `find_run`.
        FileNotFoundError: The same.
    """
    run = find_run(directory)
    others = [str(other) for other in _runs(_folder(directory)) if other != run]
    if others:
        text = f"{word}: {run}; also recorded here: {', '.join(others)}"
        print(text, file=file or sys.stderr)
    return run


def find_run(directory: str | Path) -> Path:
    """Find the one recorded run in a directory.

    Args:
        directory: A run directory, the log directory that contains it, or any
            directory with one run somewhere below.

    Raises:
        argparse.ArgumentError: It is a file.
        FileNotFoundError: There is no run, or more than one; the message lists them.
    """
    path = _folder(directory)
    if is_run(path):
        return path
    # Names of the monitor's runs that share a log directory.
    named = re.compile(r"leakwatch(-run)?(-\d+)?")
    runs = sorted(p for p in path.iterdir() if named.fullmatch(p.name) and is_run(p))
    runs = runs or find_runs(path)
    if len(runs) == 1:
        return runs[0]
    listed = ", ".join(map(str, runs[:5])) + (", …" if len(runs) > 5 else "")
    raise FileNotFoundError(
        f"{path} holds {len(runs)} recorded runs, name one of them: {listed}."
    )


def find_runs(directory: str | Path) -> list[Path]:
    """Find every recorded run in a directory, itself and those below.

    Args:
        directory: A run directory, or one above runs.

    Raises:
        argparse.ArgumentError: It is a file.
        FileNotFoundError: There is no run.
    """
    path = _folder(directory)
    runs = _runs(path)
    if not runs:
        raise FileNotFoundError(
            f"no recorded run in {path}: expected the directory that the monitor "
            f"wrote, such as runs/quickstart/version_0/leakwatch-run."
        )
    return runs


def _folder(directory: str | Path) -> Path:
    path = Path(directory).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"there is no directory {path}.")
    if not path.is_dir():
        raise argparse.ArgumentError(None, f"{path} is a file; expected {RUN}.")
    return path


def _runs(path: Path) -> list[Path]:
    # A record that lost its run.json is one all the same, and rglob follows no links.
    found = {file.parent for file in path.rglob("run.json")}
    found |= {file.parents[1] for file in path.rglob("ledger/part-*.csv")}
    found |= {folder for folder in (path, *path.iterdir()) if is_run(folder)}
    # What a resumed run measured again is no longer the record.
    return sorted(
        run
        for run in found
        if not (run.parent.name == "replaced" and run.parents[1] in found)
    )


def is_run(path: Path) -> bool:
    """Whether a directory holds a record."""
    return (path / "run.json").is_file() or any((path / "ledger").glob("part-*.csv"))
