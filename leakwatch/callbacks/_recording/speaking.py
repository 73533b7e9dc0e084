"""What callbacks say to people while a network trains."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

__all__ = ["say", "warn"]


def say(trainer: Trainer, text: str) -> None:
    """Prints a line without tearing a progress bar.

    Args:
        trainer: whose bar it is.
        text: the line.
    """
    bar = trainer.progress_bar_callback
    if bar is not None and getattr(bar, "is_enabled", False):
        bar.print(text)
    else:
        rank_zero_info(text)


def warn(text: str) -> None:
    """Warns in the first process; training goes on whatever warnings are.

    Args:
        text: a sentence.
    """
    try:
        rank_zero_warn(f"leakwatch: {text}")
    except Warning:
        # Where warnings are errors, ours must still not end training.
        rank_zero_info(f"leakwatch: {text}")
