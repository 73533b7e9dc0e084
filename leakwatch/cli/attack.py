"""``leakwatch attack``: what attacks rebuild from the gradients of one checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from leakwatch.cli.audit import add_common


def run(argv: list[str]) -> int:
    """Attack a checkpoint as the InversionAudit in its config would have.

    Args:
        argv: Command line after ``leakwatch attack``.

    Raises:
        argparse.ArgumentError: The command line or a config can't be understood.
        FileNotFoundError: There is no such checkpoint.
        ValueError: The checkpoint does not fit the config's model, or the samples
            can't be probed.
    """
    options, rest = parser().parse_known_args(argv)
    if options.ckpt is not None:
        options.ckpt = Path(options.ckpt).expanduser()
        if not options.ckpt.is_file():
            raise FileNotFoundError(f"there is no checkpoint {options.ckpt}.")
    # Here, because torch and Lightning take seconds.
    from leakwatch.cli.audit_checkpoint import audit
    from leakwatch.cli.subject import AttackCLI

    audit(options, rest, command="attack", kind=AttackCLI)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options that are not LightningCLI's."""
    made = argparse.ArgumentParser(
        prog="leakwatch attack",
        description="Attack the gradients of samples under one checkpoint, from near "
        "and from random starts, and compare with the scores: ledger, report and a "
        "table.",
        epilog="All options of `leakwatch fit` are understood as well, --config above "
        "all: model, data and InversionAudit are those of the config. Add for "
        "instance --config configs/attack/inverting_gradients.yaml to choose an "
        "attack; without an InversionAudit its defaults apply.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    made.add_argument(
        "--ckpt",
        help="checkpoint of Lightning, or a saved state_dict (default: the network as "
        "it is initialised)",
    )
    add_common(made, "leakwatch-attack beside the checkpoint, or here")
    return made
