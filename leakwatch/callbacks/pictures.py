"""Probes as pictures: private data, for local disk unless the user says otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from leakwatch.probes import ProbeSet

__all__ = ["captions", "pictures"]


def pictures(probes: ProbeSet) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """The probes as ``(n, height, width, channels)`` uint8, if they are images.

    Returns:
        ``None`` for data that is neither grey nor RGB pictures.
    """
    pixels = probes.pixels()
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    if pixels.ndim != 4 or pixels.shape[1] not in (1, 3):
        return None
    if probes.units == "input":  # unknown range: spread what there is
        low, high = pixels.amin(), pixels.amax()
        pixels = (pixels - low) / (high - low).clamp_min(1e-12)
    else:
        pixels = pixels / probes.data_range
    scaled = (pixels.clamp(0, 1) * 255).round().to(torch.uint8)
    return scaled.permute(0, 2, 3, 1).numpy()


def captions(probes: ProbeSet) -> list[str]:
    """One line per probe."""
    return [
        f"sample {index}, class {probes.class_of(i)}"
        for i, index in enumerate(probes.index)
    ]
