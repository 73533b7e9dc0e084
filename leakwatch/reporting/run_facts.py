"""What ``run.json`` says about a run as a whole: names, assumed noise, caveats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, final

from leakwatch.reporting.message import GRADIENT, Message, message_from_metadata
from leakwatch.reporting.quantities import (
    PRIOR,
    Quantity,
    class_label,
    class_names_from_metadata,
    knows,
    quantities_from_metadata,
)

__all__ = ["NEARLY_UNDEFENDED", "RunFacts", "held_for", "noise_words"]

NEARLY_UNDEFENDED: Final = 1e-3
"""Gradient units; rule of thumb: smaller noise hides next to nothing."""

_MOST_EPOCHS: Final = 12


@final
@dataclass(frozen=True)
class RunFacts:
    """What a report needs to know of a run beside its values.

    Entries that ``run.json`` lacks, or that are not what they should be, are empty.

    Attributes:
        model: What the network is called.
        message: What clients share.
        quantities: What the recorded quantities mean.
        class_names: By label.
        noise_std: That predictions assume, of each entry of the gradient.
        prior: What attackers are taken to know of images.
        floor: PSNR (dB) of guessing the mean image. Its mean squared error is the
            pixel variance of the data, R², so it is 20 log₁₀(data range / R).
        notes: Caveats that were found while the model was measured.
        assumed: What predictions take for granted that the run does not do.
        training: How what training shares differs from what is scored.
    """

    model: str
    message: Message
    quantities: Mapping[str, Quantity]
    class_names: tuple[str, ...] | None
    noise_std: float | None
    prior: str
    floor: float | None
    notes: tuple[str, ...]
    assumed: tuple[str, ...]
    training: tuple[str, ...]

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Self:
        """Read the content of ``run.json``.

        Example:
            >>> facts = RunFacts.of({
            ...     "model": "LitClassifier", "model_name": "LeNet", "notes": ["a", ""],
            ...     "config": {"noise_std": 0.01, "prior_std": 0.1, "data_range": 1.0},
            ... })
            >>> facts.model, facts.notes, facts.noise_std, facts.floor
            ('LeNet', ('a',), 0.01, 20.0)
            >>> RunFacts.of({}).floor is None
            True
        """
        config = metadata.get("config")
        if not isinstance(config, Mapping):
            config = {}
        prior, span = (_number(config.get(key)) for key in ("prior_std", "data_range"))
        prior_words = config.get("prior")
        names = (metadata.get(key) for key in ("model_name", "model"))
        texts = [name.strip() for name in names if isinstance(name, str)]
        return cls(
            model=next(filter(None, texts), ""),
            message=message_from_metadata(metadata),
            quantities=quantities_from_metadata(metadata),
            class_names=class_names_from_metadata(metadata),
            noise_std=_number(config.get("noise_std")),
            prior=prior_words if isinstance(prior_words, str) else PRIOR,
            floor=20 * math.log10(span / prior) if prior and span else None,
            notes=(*_texts(metadata.get("notes")), *_left_out(metadata)),
            assumed=_texts(metadata.get("assumed")),
            training=_texts(metadata.get("training")),
        )

    def class_label(self, label: int | None) -> str:
        """Return the name of a class as a reader meets it in a sentence."""
        return class_label(label, self.class_names)


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


def held_for(facts: RunFacts, headline: str | None) -> str:
    """Say in a sentence for which noise and which attacker predictions hold.

    Args:
        facts: Of the run.
        headline: Its predicted PSNR; None where it predicts none.

    Returns:
        The sentence; empty of a run that predicts nothing and states no noise.

    Example:
        >>> facts = RunFacts.of({"config": {"noise_std": 0.01}})
        >>> print(held_for(facts, "i2f_psnr").partition(", ")[0])
        Predictions hold for noise_std=0.01
        >>> print(held_for(RunFacts.of({}), "i2f_psnr"))
        The record does not name the noise_std of its predictions; the attacker knows \
nothing about images.
    """
    words = noise_words(facts.noise_std, facts.message)
    attacker = (
        "" if headline is None else f"; the attacker {knows(headline, facts.prior)}"
    )
    if facts.noise_std is not None:
        return f"Predictions hold for noise_std={facts.noise_std:g}, {words}{attacker}."
    if headline is None:
        return ""
    if words:
        return f"Predictions assume {words}{attacker}."
    return f"The record does not name the noise_std of its predictions{attacker}."


def _number(value: object) -> float | None:
    """Return a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and value >= 0.0 else None


def _left_out(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Which probe steps did not take place, and why."""
    entry = metadata.get("left_out")
    if not isinstance(entry, Mapping):
        return ()
    epochs = entry.get("epochs")
    if not isinstance(epochs, list) or not epochs:
        return ()
    named = ", ".join(str(epoch) for epoch in epochs[:_MOST_EPOCHS])
    more = " …" if len(epochs) > _MOST_EPOCHS else ""
    words = "epoch" if len(epochs) == 1 else "epochs"
    return (f"not probed after {words} {named}{more}: {entry.get('why')}",)


def _texts(entry: object) -> tuple[str, ...]:
    texts = [entry] if isinstance(entry, str) else entry
    if not isinstance(texts, list | tuple):
        return ()
    return tuple(dict.fromkeys(str(text) for text in texts if text))
