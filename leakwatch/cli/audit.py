"""``leakwatch audit``: the scores of a finished checkpoint, once."""

from __future__ import annotations

import argparse
from pathlib import Path


def run(argv: list[str]) -> int:
    """Score a checkpoint as the monitor in its config would have.

    Args:
        argv: Command line after ``leakwatch audit``.

    Raises:
        argparse.ArgumentError: The command line or a config can't be understood.
        FileNotFoundError: There is no such checkpoint.
        ValueError: The checkpoint does not fit the config's model, or the samples
            can't be probed.
    """
    options, rest = parser().parse_known_args(argv)
    options.ckpt = Path(options.ckpt).expanduser()
    if not options.ckpt.is_file():
        raise FileNotFoundError(f"there is no checkpoint {options.ckpt}.")
    # Here, because torch and Lightning take seconds.
    from leakwatch.cli.audit_checkpoint import audit

    audit(options, rest)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options that are not LightningCLI's."""
    made = argparse.ArgumentParser(
        prog="leakwatch audit",
        description="Score a finished checkpoint once: ledger, report and a table.",
        epilog="All options of `leakwatch fit` are understood as well, --config above "
        "all: model, data and monitor are those of the config; without a "
        "LeakageMonitor there, its defaults apply.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    made.add_argument(
        "--ckpt", required=True, help="checkpoint of Lightning, or a saved state_dict"
    )
    add_common(made, "leakwatch-audit beside the checkpoint")
    return made


def add_common(made: argparse.ArgumentParser, where: str) -> None:
    """Add the options that scoring and attacking a checkpoint share.

    Args:
        made: Gets them.
        where: Where the record goes by default.
    """
    made.add_argument(
        "--split",
        choices=("train", "val"),
        default="train",
        help="where the samples come from (default: train)",
    )
    made.add_argument(
        "--probes", type=int, help="how many samples (default: as in the config)"
    )
    made.add_argument(
        "--output",
        help=f"directory for ledger and report (default: {where}); one that is taken "
        "gets a number",
    )
    made.add_argument(
        "--device", help="such as cpu or cuda (default: as in the config)"
    )
    made.add_argument(
        "--trust",
        action="store_true",
        help="read Python objects in the checkpoint, which can run any code",
    )
