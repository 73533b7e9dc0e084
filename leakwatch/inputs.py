"""What is wrong with a batch, said before anything is computed from it."""

from __future__ import annotations

from torch import Tensor

__all__ = ["check_rows", "check_samples", "refuse_integers"]


def refuse_integers(x: Tensor) -> None:
    """Raises unless ``x`` is a floating-point tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"inputs must be a tensor, got a {type(x).__name__}.")
    if not x.is_floating_point():
        raise ValueError(
            f"inputs must be floating point network inputs, got {x.dtype}; convert "
            f"images with x.float() / 255 and normalise them as in training."
        )


def check_samples(x: Tensor, y: Tensor) -> None:
    """Raises unless there are floating-point inputs and one label for each."""
    refuse_integers(x)
    if not isinstance(y, Tensor):
        raise TypeError(f"labels must be a tensor, got a {type(y).__name__}.")
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y) or len(x) == 0:
        raise ValueError(
            f"one label per sample and at least one sample are needed, got inputs of "
            f"shape {tuple(x.shape)} and labels of shape {tuple(y.shape)}."
        )


def check_rows(name: str, t: Tensor, shape: tuple[int, ...]) -> None:
    """Raises unless ``t`` has this shape."""
    if t.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(t.shape)}.")
