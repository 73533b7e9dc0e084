"""``leakwatch export``: every value of a run as one table."""

from __future__ import annotations

import argparse
from pathlib import Path

from leakwatch.cli.report import RUN, take_run
from leakwatch.reporting import RiskLedger


def export(argv: list[str]) -> None:
    """Write the ledger of a run as CSV or Parquet.

    Args:
        argv: Command line after ``leakwatch export``.

    Raises:
        argparse.ArgumentError: RUN is a file.
        FileNotFoundError: There is no run, or more than one, or no folder for FILE.
        ModuleNotFoundError: A table needs pandas, and Parquet pyarrow.
        ValueError: For a table of another kind.
    """
    parser = argparse.ArgumentParser(
        prog="leakwatch export",
        description="Write every value of a recorded run into one table: run, epoch, "
        "step, sample, class, quantity, value, status. A value whose status is neither "
        "ok nor estimated is not a number to be read.",
    )
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="such as values.csv or values.parquet"
    )
    asked = parser.parse_args(argv)
    file: Path = asked.file
    if file.suffix not in (".csv", ".parquet"):
        raise ValueError(f"FILE must end in .csv or .parquet, got {file}.")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {file.parent} for {file.name}.")
    frame = RiskLedger.open(take_run(asked.run)).to_dataframe()
    if file.suffix == ".csv":
        frame.to_csv(file, index=False)
    else:
        try:
            frame.to_parquet(file, index=False)
        except ImportError as error:
            raise ModuleNotFoundError(
                "Parquet needs pyarrow, which is not installed: pip install pyarrow",
                name="pyarrow",
            ) from error
    print(f"{len(frame)} values: {file}")
