"""The command ``leakwatch``: fit, audit and report."""

from leakwatch.cli.entry import main

__all__ = ["main"]
