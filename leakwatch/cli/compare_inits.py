"""``leakwatch compare-inits``: which initialisation of a network leaks least."""

from __future__ import annotations

import argparse


def run(argv: list[str]) -> int:
    """Compare initialisations as a config says.

    Args:
        argv: Command line after ``leakwatch compare-inits``.

    Raises:
        argparse.ArgumentError: The command line or a config can't be understood.
        ValueError: The samples can't be probed, or settings don't fit each other.
    """
    if not argv:
        raise argparse.ArgumentError(
            None,
            "nothing to compare; pass a config, such as "
            "`leakwatch compare-inits --config configs/compare_inits.yaml`.",
        )
    options, rest = parser().parse_known_args(argv)
    # Here, because torch and Lightning take seconds.
    from leakwatch.cli.comparing import compare

    compare(options, rest)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options that are not LightningCLI's."""
    made = argparse.ArgumentParser(
        prog="leakwatch compare-inits",
        description="Initialise one network in several ways under several seeds, and "
        "compare what its gradients give away: scores, attacks, a ranking, a report.",
        epilog="All options of `leakwatch fit` are understood as well, --config above "
        "all: model and data are those of the config. The group `compare` holds what "
        "is compared: --compare.schemes, seeds, samples, noise_std, attacks, steps, "
        "repeats, start, epochs and more; see configs/compare_inits.yaml.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    made.add_argument(
        "--output",
        help="directory for tables and report (default: leakwatch-compare-inits here); "
        "one that is taken gets a number",
    )
    made.add_argument(
        "--device", help="such as cpu or cuda (default: as in the config)"
    )
    return made
