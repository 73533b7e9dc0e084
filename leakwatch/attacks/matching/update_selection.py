"""The network, ready for gradients at any weights: by layers where they are right."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from leakwatch.attacks.matching.update_engines import PlainPath, UpdatePath
from leakwatch.attacks.matching.update_layered import LayeredPath
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.runtime import (
    SampleLoss,
    UnsupportedModuleError,
    Weights,
    evaluating,
)
from leakwatch.derivatives.verification import refuse_stray_reads
from leakwatch.status import describe_error

__all__ = ["PathFor", "UpdatePathName", "opened"]

UpdatePathName: TypeAlias = Literal["auto", "layers", "plain"]

_log = logging.getLogger(__name__)

# Agreement of the two paths, relative: above rounding, also next to kinks, and below
# any mistake.
_TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-9}

PathFor: TypeAlias = Callable[[Tensor, Tensor, Tensor], UpdatePath]
"""Gives the path for weights, images and labels of some attacks."""


@contextmanager
def opened(gradients: GradientMap, name: UpdatePathName = "auto") -> Iterator[PathFor]:
    """The network, ready to be evaluated at any weights, set up once.

    Args:
        gradients: whose module and criterion are used; its own weights are not.
        name: ``"layers"``, ``"plain"``, or ``"auto"`` for layers where they are right.

    Yields:
        A function that gives the path for weights, images and labels of some attacks,
        which it is tried on. It raises UnsupportedModuleError for a network that reads
        parameters where they are not registered.
    """
    loss = gradients.loss_under(gradients.criterion)
    device = next(gradients.module.parameters()).device.type
    if device == "cpu":
        _keep_freed_memory()
    conditions = evaluating(loss, device, gradients.dtype, substitutes=False)
    with conditions as at, ExitStack() as stack:

        def path_for(w: Tensor, x: Tensor, y: Tensor) -> UpdatePath:
            found = _chosen(loss, at, name, w, x, y)
            # Checkpointed parts of a forward run again during the backward pass.
            stack.enter_context(loss.holding())
            if isinstance(found, LayeredPath):
                found.settle(x[0].detach(), y[0])
            return found

        yield path_for


def _keep_freed_memory() -> None:
    # Each step asks for the memory that the step before has freed. The GNU allocator
    # learns from what is freed how much to keep, at most 64 MiB, instead of having the
    # system clear the same pages again and again: a third of a small step's time. Never
    # written to, this takes neither memory nor time.
    torch.empty(2**25 - 2**13, dtype=torch.uint8)


def _chosen(
    loss: SampleLoss,
    at: Weights,
    name: UpdatePathName,
    w: Tensor,
    x: Tensor,
    y: Tensor,
) -> UpdatePath:
    refuse_stray_reads(loss, at, x[0], y[0])
    plain = PlainPath(loss, at)
    if name == "plain":
        return plain
    try:
        layered = LayeredPath(loss, at)
        reason = _difference(layered, plain, w[:2], x[:2], y[:2])
    # Anything may come out of a network that a path can't take.
    except Exception as error:
        reason = describe_error(error)
    if not reason:
        return layered
    kind = type(loss.module).__name__
    if name == "layers":
        raise UnsupportedModuleError(
            f"{kind} can't be attacked by path='layers' ({reason}); use path='auto'."
        )
    _log.warning(
        "leakwatch attacks updates of %s one by one, which is slower: %s.", kind, reason
    )
    return plain


def _difference(
    path: UpdatePath, plain: UpdatePath, w: Tensor, x: Tensor, y: Tensor
) -> str:
    """What is wrong with a path, empty for nothing."""
    generator = torch.Generator().manual_seed(0)
    # Clients that start alike would hide that their samples are mixed up.
    x = x + 0.1 * torch.randn(x.shape, generator=generator).to(x)
    right = plain.graph(w, x, y)
    c, v = torch.randn(2, *w.shape, generator=generator).to(w)
    found = path.graph(w, x, y)
    ours, theirs = (graph.pull(c, along=v, weights=True) for graph in (found, right))
    wrong = [_relative(found.flat, right.flat), _relative(ours.images, theirs.images)]
    if ours.weights is not None and theirs.weights is not None:
        wrong.append(_relative(ours.weights, theirs.weights))
        # The slope is ⟨weights, v⟩, in which most may cancel.
        size = theirs.weights.norm(dim=1) * v.norm(dim=1)
        if ours.slope is not None and theirs.slope is not None:
            off = (ours.slope - theirs.slope).abs() / size.clamp_min(1e-30)
            wrong.append(float(torch.nan_to_num(off, nan=math.inf).max()))
    worst = max(wrong)
    if not math.isfinite(worst):
        return "its values are not finite"
    if worst <= _TOLERANCE[x.dtype]:
        return ""
    return f"its values differ from those of double backward by {worst:.0e}"


def _relative(a: Tensor, b: Tensor) -> float:
    a, b = (t.reshape(len(t), -1).double() for t in (a, b))
    wrong = (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-30)
    return float(torch.nan_to_num(wrong, nan=math.inf).max())
