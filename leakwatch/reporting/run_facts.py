"""What ``run.json`` says about a run as a whole: model, assumed noise, caveats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from leakwatch.reporting.message import GRADIENT, Message

NEARLY_UNDEFENDED: Final = 1e-3
"""Gradient units; rule of thumb: smaller noise hides next to nothing."""


def noise_from_metadata(metadata: Mapping[str, Any]) -> float | None:
    """Return the noise that predictions assume, per gradient entry, or None.

    Example:
        >>> noise_from_metadata({"config": {"noise_std": 0.01}})
        0.01
        >>> noise_from_metadata({"config": {"noise_std": None}}) is None
        True
    """
    config = metadata.get("config")
    value = config.get("noise_std") if isinstance(config, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and value >= 0.0 else None


def floor_from_metadata(metadata: Mapping[str, Any]) -> float | None:
    """Return the PSNR (dB) of guessing the mean image, or None where not known.

    Its mean squared error is the pixel variance of the data, R², so it is
    20 log₁₀(data range / R).

    Example:
        >>> floor_from_metadata({"config": {"prior_std": 0.1, "data_range": 1.0}})
        20.0
    """
    config = metadata.get("config")
    if not isinstance(config, Mapping):
        return None
    found = [config.get(key) for key in ("prior_std", "data_range")]
    numbers = [
        float(v)
        for v in found
        if isinstance(v, int | float) and not isinstance(v, bool)
    ]
    if len(numbers) < 2 or not all(math.isfinite(v) and v > 0 for v in numbers):
        return None
    return 20 * math.log10(numbers[1] / numbers[0])


def noise_words(noise_std: float | None, message: Message = GRADIENT) -> str:
    """Say which noise a prediction assumes; empty where nothing is said.

    Args:
        noise_std: Gradient units; None where none was stated.
        message: On which it lies.

    Example:
        >>> print(noise_words(0.1))
        Gaussian noise of standard deviation 0.1 on every entry of the shared gradient
        >>> noise_words(0.0001).endswith(" (close to an undefended gradient)")
        True
        >>> noise_words(None)
        ''
    """
    if noise_std is None:
        return message.unstated
    words = message.noise.format(std=f"{noise_std:g}")
    close = " (close to an undefended gradient)"
    return words + (close if noise_std <= NEARLY_UNDEFENDED else "")


def notes_from_metadata(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the caveats that were found while the model was measured.

    Example:
        >>> notes_from_metadata({"notes": ["one", ""]}), notes_from_metadata({})
        (('one',), ())
    """
    return _texts(metadata, "notes")


def assumed_from_metadata(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what predictions take for granted that the run does not do.

    Example:
        >>> assumed_from_metadata({"assumed": ["no defense adds this noise"]})
        ('no defense adds this noise',)
    """
    return _texts(metadata, "assumed")


def _texts(metadata: Mapping[str, Any], name: str) -> tuple[str, ...]:
    found = metadata.get(name)
    if isinstance(found, str):
        found = [found]
    if not isinstance(found, list | tuple):
        return ()
    return tuple(dict.fromkeys(str(text) for text in found if text))


def model_from_metadata(metadata: Mapping[str, Any]) -> str:
    """Return what the model is called, or an empty text.

    Example:
        >>> model_from_metadata({"model": "LitClassifier", "model_name": "LeNet"})
        'LeNet'
    """
    for key in ("model_name", "model"):
        name = metadata.get(key)
        if isinstance(name, str) and name.strip():
            return name.strip()
    return ""
