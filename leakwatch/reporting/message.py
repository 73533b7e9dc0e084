"""What clients of a run share, and how its report speaks of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

__all__ = ["GRADIENT", "UPDATE", "Message", "message_from_metadata"]


@final
@dataclass(frozen=True)
class Message:
    """What an attacker sees, in the words of a report.

    Attributes:
        name: of the kind, the entry ``message`` of ``run.json``.
        noun: what a client shares.
        heading: of the report; ``{model}`` stands for the network's name.
        exposing: the message that shows the most exposed sample.
        noise: what predictions assume; ``{std}`` stands for a standard deviation in
            gradient units.
        unstated: what they assume where no such noise is stated; may be empty.
        attacked: what an audit attacks, a sentence; ``{when}`` stands for its moment.
    """

    name: str
    noun: str
    heading: str
    exposing: str
    noise: str
    unstated: str
    attacked: str


GRADIENT: Final = Message(
    name="gradient",
    noun="gradient",
    heading="Gradient leakage of {model}",
    exposing="the gradient of the most exposed sample",
    noise="Gaussian noise of standard deviation {std} on every entry of the shared "
    "gradient",
    unstated="",
    attacked="Gradients of watched samples were attacked {when}, each of one sample "
    "alone.",
)
"""One gradient of one sample."""

UPDATE: Final = Message(
    name="update",
    noun="weight update",
    heading="Weight-update leakage of {model}",
    exposing="the weight update of the client that holds the most exposed sample",
    noise="Gaussian noise of standard deviation {std} on every entry of the gradient "
    "that stands for the weight update",
    unstated="that what one gradient does not explain of an update is Gaussian noise",
    attacked="Weight updates of watched clients were attacked {when}, each with all "
    "samples of its client at once.",
)
"""Weights before minus weights after the local training of a federated client."""

_KINDS: Final = {kind.name: kind for kind in (GRADIENT, UPDATE)}


def message_from_metadata(metadata: Mapping[str, Any]) -> Message:
    """Return what the clients of a run shared; gradients where nothing is said.

    Example:
        >>> message_from_metadata({"message": "update"}).noun
        'weight update'
        >>> message_from_metadata({}).noun
        'gradient'
    """
    return _KINDS.get(str(metadata.get("message", "")), GRADIENT)
