"""A clock for work that a device may still be at when its call has returned."""

from __future__ import annotations

import time

import torch

__all__ = ["finished"]


def finished(device: torch.device) -> float:
    """``time.perf_counter()`` once the device has done what it was given.

    Args:
        device: on which the timed work runs.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
