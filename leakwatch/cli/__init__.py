"""The command ``leakwatch``: fit, audit and report."""

from leakwatch.cli.main import main

__all__ = ["main"]
