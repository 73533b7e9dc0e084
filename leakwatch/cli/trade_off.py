"""``leakwatch trade-off``: what a defense costs in accuracy, and what it buys."""

from __future__ import annotations

import argparse


def run(argv: list[str]) -> int:
    """Compare defenses as a config says.

    Args:
        argv: Command line after ``leakwatch trade-off``.

    Raises:
        argparse.ArgumentError: The command line or a config can't be understood.
        ValueError: The samples can't be probed, or settings don't fit each other.
    """
    if not argv:
        raise argparse.ArgumentError(
            None,
            "nothing to compare; pass a config, such as "
            "`leakwatch trade-off --config configs/trade_off.yaml`.",
        )
    options, rest = parser().parse_known_args(argv)
    # Here, because torch and Lightning take seconds.
    from leakwatch.cli.trade_study import compare

    compare(options, rest)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options that are not LightningCLI's."""
    made = argparse.ArgumentParser(
        prog="leakwatch trade-off",
        description="Train one network under each of several defenses and budgets, "
        "measure its accuracy, attack what it shares, and draw one against the other: "
        "a table, a figure, a report.",
        epilog="All options of `leakwatch fit` are understood as well, --config above "
        "all: model, data and training are those of the config. The group `trade_off` "
        "holds what is compared: --trade_off.defenses, budgets, unit, mixup, seeds, "
        "samples, queries, attack, steps, attackers, pretrain_epochs, wandb and more; "
        "see configs/trade_off.yaml.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    made.add_argument(
        "--output",
        help="directory for tables and report (default: leakwatch-trade-off here); one "
        "that is taken gets a number",
    )
    made.add_argument(
        "--device", help="such as cpu or cuda (default: as in the config)"
    )
    return made
