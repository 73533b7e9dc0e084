"""``leakwatch fit``: train what a config describes, and watch it."""

from __future__ import annotations

import argparse


def run(argv: list[str]) -> int:
    """Train, then print how exposure went.

    Args:
        argv: Command line after ``leakwatch fit``.

    Raises:
        argparse.ArgumentError: The command line or a config can't be understood.
        Exception: Whatever training raises.
    """
    if not argv:
        raise argparse.ArgumentError(
            None,
            "nothing to train; pass a config, such as "
            "`leakwatch fit --config configs/quickstart.yaml`.",
        )
    # Here, because torch and Lightning take seconds.
    from leakwatch.cli.training import train

    train(argv)
    return 0
