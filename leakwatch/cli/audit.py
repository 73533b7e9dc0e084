"""The options of ``leakwatch audit`` and ``leakwatch attack``; nothing heavy here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

from leakwatch.cli.record import ONLY_FIT, Record
from leakwatch.cli.report import is_run, take_run

__all__ = ["add_places", "attack", "audit"]


def audit(argv: list[str]) -> None:
    """Score a checkpoint as the monitor in its config would have.

    Args:
        argv: Command line after ``leakwatch audit``.

    Raises:
        argparse.ArgumentError: The command line or a config can't be understood.
        FileNotFoundError: There is no such checkpoint.
        ValueError: The checkpoint does not fit the config's model, or the samples
            can't be probed.
    """
    parser = argparse.ArgumentParser(
        prog="leakwatch audit",
        description="Score a finished checkpoint once: ledger, report and a table.",
        epilog="All options of `leakwatch fit` are understood as well, --config above "
        "all: model, data and monitor are those of the config; without a "
        "LeakageMonitor there, its defaults apply.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--ckpt", help="checkpoint of Lightning, or a saved state_dict")
    _run(parser, argv, "audit", "leakwatch-audit beside the checkpoint")


def attack(argv: list[str]) -> None:
    """Attack a checkpoint as the InversionAudit in its config would have.

    Args:
        argv: Command line after ``leakwatch attack``.

    Raises:
        argparse.ArgumentError: The command line or a config can't be understood.
        FileNotFoundError: There is no such checkpoint.
        ValueError: The checkpoint does not fit the config's model, or the samples
            can't be probed.
    """
    parser = argparse.ArgumentParser(
        prog="leakwatch attack",
        description="Attack the gradients of samples under one checkpoint, from near "
        "and from random starts, and compare with the scores: ledger, report and a "
        "table.",
        epilog="All options of `leakwatch fit` are understood as well, --config above "
        "all: model, data and InversionAudit are those of the config. Add for "
        "instance --config leakwatch:attack/inverting_gradients to choose an "
        "attack; without an InversionAudit its defaults apply.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument(
        "--ckpt",
        help="checkpoint of Lightning, or a saved state_dict (default: the network as "
        "it is initialised)",
    )
    _run(parser, argv, "attack", "leakwatch-attack beside the checkpoint, or here")


def add_places(parser: argparse.ArgumentParser, holds: str, where: str) -> None:
    """Add the options that say where a command writes and computes.

    Args:
        parser: Gets ``--output`` and ``--device``.
        holds: What the command writes.
        where: Where that goes by default.
    """
    parser.add_argument(
        "--output",
        help=f"directory for {holds} (default: {where}); one that is taken gets a "
        "number",
    )
    parser.add_argument(
        "--device", help="such as cpu or cuda (default: as in the config)"
    )


def add_cells(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how the cells of a study are computed and kept.

    Args:
        parser: Gets ``--jobs`` and ``--cells``.
    """
    parser.add_argument(
        "--jobs",
        type=int,
        help="processes that compute cells side by side, each with as many threads as "
        "OMP_NUM_THREADS says (default: 1)",
    )
    parser.add_argument(
        "--cells",
        help="folder in which finished cells are kept: the same command with the same "
        "folder goes on where it was killed",
    )


def _run(
    parser: argparse.ArgumentParser,
    argv: list[str],
    command: Literal["audit", "attack"],
    where: str,
) -> None:
    parser.add_argument(
        "--from",
        dest="run",
        metavar="RUN",
        help="repeat what was recorded in this directory by a command: the same "
        "network, samples and settings, and say which values are equal; what is given "
        "besides differs",
    )
    parser.add_argument(
        "--split",
        choices=("train", "val"),
        help="where the samples come from (default: train)",
    )
    parser.add_argument(
        "--probes", type=int, help="how many samples (default: as in the config)"
    )
    add_places(parser, "ledger and report", where)
    parser.add_argument(
        "--trust",
        action="store_true",
        help="read Python objects in the checkpoint, which can run any code",
    )
    options, rest = parser.parse_known_args(argv)
    record = None
    if options.run is not None:
        record = Record.read(take_run(options.run))
        record.fill_in(options)
    _check_config(rest)
    if options.ckpt is not None:
        options.ckpt = Path(options.ckpt).expanduser()
        if not options.ckpt.is_file():
            raise FileNotFoundError(f"there is no checkpoint {options.ckpt}.")
    elif command == "audit":
        raise ValueError("there is nothing to score; --ckpt names a checkpoint.")
    # Here, because torch and Lightning take seconds.
    from leakwatch.cli.audit_checkpoint import audit_checkpoint

    audit_checkpoint(options, rest, command, record)


def _check_config(rest: list[str]) -> None:
    """Refuse the config of a run that has none: its program was not leakwatch.

    Raises:
        argparse.ArgumentError: It is somewhere else, or nowhere.
    """
    for before, option in zip(["", *rest], rest, strict=False):
        given = option.startswith(("-c=", "--config="))
        if not given and before not in ("-c", "--config"):
            continue
        path = Path(option.partition("=")[2] if given else option).expanduser()
        if path.name != "config.yaml" or not path.parent.is_dir() or path.exists():
            continue
        folders = (path.parent, *sorted(path.parent.iterdir()))
        runs = [folder for folder in folders if is_run(folder)]
        saved = [run / path.name for run in runs if (run / path.name).is_file()]
        if saved:
            raise argparse.ArgumentError(None, f"there is no {path}, but {saved[0]}.")
        if runs:
            raise argparse.ArgumentError(None, f"there is no {path}; {ONLY_FIT}")
