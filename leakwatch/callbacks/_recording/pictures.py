"""Probes as pictures: private data, for local disk unless the user says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakwatch.probes import ProbeSet
from leakwatch.reporting.html.markup import difference

__all__ = ["attack_panels", "captions", "pictures", "to_pictures"]


def pictures(probes: ProbeSet) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """The probes as ``(n, height, width, channels)`` uint8, if they are images.

    Returns:
        ``None`` for data that is neither grey nor RGB pictures.
    """
    return to_pictures(probes.pixels(), probes)


def to_pictures(
    pixels: Tensor, probes: ProbeSet
) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """Images on the scale of the probes as uint8, ``(n, height, width, channels)``.

    Args:
        pixels: in pixel units, one image per row.
        probes: whose range decides what is black and what is white.

    Returns:
        ``None`` for data that is neither grey nor RGB pictures.
    """
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    if pixels.ndim != 4 or pixels.shape[1] not in (1, 3):
        return None
    if probes.units == "input":  # unknown range: spread what there is
        seen = probes.pixels()
        low, high = seen.amin(), seen.amax()
        pixels = (pixels - low) / (high - low).clamp_min(1e-12)
    else:
        pixels = pixels / probes.data_range
    scaled = (pixels.nan_to_num(0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    return scaled.permute(0, 2, 3, 1).cpu().numpy()


def attack_panels(
    attacks: Mapping[str, Any], probes: ProbeSet
) -> tuple[np.ndarray[Any, np.dtype[np.uint8]] | None, list[str]]:
    """Original | reconstruction | difference side by side, one panel per attack.

    Args:
        attacks: what the ledger keeps of one step.
        probes: for the captions.

    Returns:
        Panels ``(n, height, 3 · width, channels)`` and one caption for each; ``None``
        without any.
    """
    panels, words = [], []
    original = attacks.get("original")
    place = {sample: i for i, sample in enumerate(probes.index)}
    for kind in ("near", "random"):
        if original is None or kind not in attacks:
            continue
        rebuilt = attacks[kind]
        panel = [original, rebuilt, difference(rebuilt, original)]
        panels.append(np.concatenate(panel, axis=2))
        for sample in attacks["sample"]:
            words.append(f"{_title(probes, place[int(sample)])}, {kind} start")
    return (np.concatenate(panels) if panels else None), words


def captions(probes: ProbeSet) -> list[str]:
    """One line per probe."""
    return [_title(probes, i) for i in range(len(probes))]


def _title(probes: ProbeSet, i: int) -> str:
    name = probes.class_of(i)
    return f"sample {probes.index[i]}" + (f", class {name}" if name else "")
