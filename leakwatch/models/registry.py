"""Architectures by name: one file and one line in `leakwatch.models` each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from leakwatch.names import meant

ModelBuilder = Callable[..., nn.Module]

_MODELS: dict[str, ModelBuilder] = {}
_SHARED = ("in_channels", "num_classes", "image_size")


def register_model(name: str, builder: ModelBuilder) -> None:
    """Make an architecture available by name.

    Args:
        name: What `LitClassifier(model=name)` will ask for.
        builder: A class or function that takes the keywords `in_channels`,
            `num_classes` and `image_size`, and any others of its own, and returns
            a module whose `forward(x)` gives logits.

    Raises:
        ValueError: The name is taken, or `builder` can't take the three keywords.
    """
    if name in _MODELS:
        raise ValueError(
            f"A model named {name!r} is already registered "
            f"({_MODELS[name].__qualname__}); choose another name."
        )
    parameters = inspect.signature(builder).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    lacking = [key for key in _SHARED if key not in parameters]
    if lacking and not open_ended:
        raise ValueError(
            f"The builder of model {name!r} must take the keywords "
            f"{', '.join(_SHARED)}; it lacks {', '.join(lacking)}."
        )
    _MODELS[name] = builder


def registered_models() -> tuple[str, ...]:
    """Return the registered names in alphabetical order."""
    return tuple(sorted(_MODELS))


def build_model(
    name: str,
    *,
    in_channels: int,
    num_classes: int,
    image_size: int | tuple[int, int],
    model_args: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build a registered architecture.

    Args:
        name: A registered name.
        in_channels: Channels of the input image.
        num_classes: Number of logits.
        image_size: Side of a square image, or (height, width), in pixels.
        model_args: Further keywords of that architecture.

    Raises:
        ValueError: Unknown name, an unknown keyword in `model_args`, or one there
            that has its own argument; the message lists what is known.

    Example:
        >>> net = build_model("lenet", in_channels=1, num_classes=10, image_size=28,
        ...                   model_args={"activation": "relu"})
        >>> sum(p.numel() for p in net.parameters())
        17038
    """
    if name not in _MODELS:
        raise ValueError(
            f"Unknown model {name!r}; {meant(name, _MODELS)}registered: "
            f"{', '.join(registered_models())}. "
            "Add your own with leakwatch.models.register_model(name, builder), or "
            "pass a torch.nn.Module."
        )
    builder = _MODELS[name]
    extra = dict(model_args or {})
    if doubled := sorted(set(extra) & set(_SHARED)):
        raise ValueError(
            f"model_args contains {', '.join(doubled)}: give "
            f"{'them' if len(doubled) > 1 else 'it'} as an argument of its own."
        )
    parameters = inspect.signature(builder).parameters
    own = sorted(
        key
        for key, p in parameters.items()
        if key not in _SHARED and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    )
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = sorted(set(extra) - set(own))
    if unknown and not open_ended:
        raise ValueError(
            f"Model {name!r} has no argument {', '.join(map(repr, unknown))}; "
            f"model_args may contain: {', '.join(own) or 'nothing'}."
        )
    return builder(
        in_channels=in_channels,
        num_classes=num_classes,
        image_size=image_size,
        **extra,
    )
