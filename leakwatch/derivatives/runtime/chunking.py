"""Batches in pieces that fit memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["in_chunks", "out_of_memory", "release"]


def in_chunks(f: Callable[..., Tensor], args: tuple[Tensor, ...], chunk: int) -> Tensor:
    """``f`` over the leading dimension in chunks, halved when memory runs out.

    Args:
        f: a function of tensors with one row per item.
        args: its arguments, at least one row.
        chunk: rows at once.

    Returns:
        The results of all rows.

    Raises:
        RuntimeError: what ``f`` raises; out of memory, also as ``MemoryError``, only
            for a single row.
    """
    out: list[Tensor] = []
    start, total = 0, len(args[0])
    chunk = min(chunk, total)
    while start < total:
        try:
            out.append(f(*(a[start : start + chunk] for a in args)))
            start += chunk
            continue
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error) or chunk == 1:
                raise
        # Out of the handler, where the traceback no longer holds what filled memory.
        chunk = max(1, chunk // 2)
        release()
    return torch.cat(out) if len(out) > 1 else out[0]


def release() -> None:
    """Gives back memory that torch keeps for itself, before another try."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that a device ran out of memory."""
    text = str(error)
    return isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or any(
        phrase in text
        for phrase in (
            "can't allocate memory",
            "out of memory",
            "not enough memory",
            "ALLOC_FAILED",
        )
    )
