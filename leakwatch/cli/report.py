"""``leakwatch report``: report.html again, from what was recorded."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from leakwatch.reporting import write_report


def report(argv: list[str]) -> None:
    """Rebuild the report of a run and print its path.

    Args:
        argv: Command line after ``leakwatch report``.

    Raises:
        FileNotFoundError: There is no run, or more than one.
    """
    parser = argparse.ArgumentParser(
        prog="leakwatch report",
        description="Rebuild report.html from a recorded run and print its path.",
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        help="the run's directory, or a directory above it that holds one run",
    )
    parser.add_argument(
        "--shared",
        action="store_true",
        help="put plotly.js into a file beside the report, which is small then",
    )
    asked = parser.parse_args(argv)
    print(write_report(find_run(asked.run), shared=asked.shared))


def find_run(directory: str | Path) -> Path:
    """Find the one recorded run in a directory.

    Args:
        directory: A run directory, the log directory that contains it, or any
            directory with one run somewhere below.

    Raises:
        FileNotFoundError: There is no run, or more than one; the message lists them.
    """
    path = Path(directory).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"there is no directory {path}.")
    if _is_run(path):
        return path
    # Names of the monitor's runs that share a log directory.
    named = re.compile(r"leakwatch(-run)?(-\d+)?")
    runs = sorted(p for p in path.iterdir() if named.fullmatch(p.name) and _is_run(p))
    runs = runs or runs_below(path)
    if len(runs) == 1:
        return runs[0]
    if runs:
        listed = ", ".join(map(str, runs[:5])) + (", …" if len(runs) > 5 else "")
        raise FileNotFoundError(
            f"{path} holds {len(runs)} recorded runs, name one of them: {listed}."
        )
    raise FileNotFoundError(
        f"no recorded run in {path}: expected the directory that the monitor wrote, "
        f"such as runs/quickstart/version_0/leakwatch-run."
    )


def runs_below(directory: str | Path) -> list[Path]:
    """Every recorded run below a directory; none below one that is a run itself."""
    path = Path(directory).expanduser()
    if _is_run(path):
        return []
    return sorted({file.parent for file in path.rglob("run.json")})


def _is_run(path: Path) -> bool:
    return (path / "run.json").is_file() or any((path / "ledger").glob("part-*.csv"))
