"""What can be trusted about a module's derivatives, found out once, on two samples.

A derivative can be wrong without an error: a weight that is read behind the module's
back, a part of the forward that autograd takes as constant, a transform that misses a
side effect. So before the first product both ways of differentiating run on the same
samples, next to a finite difference, and the forward is watched operation by
operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from leakwatch.derivatives.autodiff import Product, pulled, pushed
from leakwatch.derivatives.runtime import (
    SampleLoss,
    UnsupportedModuleError,
    Weights,
    evaluating,
)
from leakwatch.derivatives.verification.behaviour import (
    batch_dependence,
    gradient_hooks,
    is_random,
)
from leakwatch.derivatives.verification.compare import in_general_position
from leakwatch.derivatives.verification.failures import (
    attempt,
    culprit_of,
    first_line,
    remedy,
)
from leakwatch.derivatives.verification.forward_watch import ForwardWatch, watch_forward
from leakwatch.derivatives.verification.rounding import Rounding, shaken_weights
from leakwatch.status import OK, Status

__all__ = ["Examination", "Path", "examine"]

Path: TypeAlias = Literal["auto", "vmap", "loop"]


@dataclass(frozen=True)
class Examination:
    """What was found.

    Attributes:
        path: how to differentiate, ``"vmap"`` or ``"loop"``.
        push: J v on the ``"vmap"`` path.
        pull: Jᵀ u on the ``"vmap"`` path.
        why: why not batched; empty for ``"vmap"``.
        notes: what a reader of the results should know about the module.
        conclusive: False when the gradient of a sample was zero or not finite, so that
            its derivatives could not be compared.
        doubt: what results are worth at most: ``ok``; ``estimated`` where it could not
            be found out whether derivatives show all of the dependence on the input;
            ``failed`` where they don't.
        sharp: whether they show all that float64 can tell, so that the same may be
            expected of other samples.
        facts: numbers that were found later, and hold until the network is changed.
    """

    path: Literal["vmap", "loop"]
    push: Product
    pull: Product
    why: str
    notes: tuple[str, ...]
    conclusive: bool
    doubt: Status
    sharp: bool = False
    facts: dict[object, int] = field(default_factory=dict)


def examine(
    loss: SampleLoss, at: Weights, x: Tensor, y: Tensor, path: Path
) -> Examination:
    """Compares the ways of differentiating on the first two samples.

    Args:
        loss: module and criterion, under evaluation.
        at: its weights.
        x: inputs, at least one.
        y: labels.
        path: the wanted path.

    Returns:
        The findings.

    Raises:
        UnsupportedModuleError: no path gives derivatives that can be trusted.
    """
    name = type(loss.module).__name__
    xs, ys = x[:2].detach(), y[:2]
    if len(xs) == 1:  # two, because data-dependent code may pass for a batch of one
        xs, ys = torch.cat([xs, xs / 2]), ys.expand(2, *ys.shape[1:])
    with torch.no_grad():
        loss.caches.find(
            loss.module,
            lambda i: loss.sample(at.shared, at.fixed, xs[i] / (i + 1), ys[i]),
        )
    watch = watch_forward(loss, at, xs, ys)
    loss.tensors.written = (loss.tensors.written or frozenset()) | watch.written
    shaken = shaken_weights(at)
    rounding = Rounding(watch.lower)
    if is_random(loss, shaken, xs[0], ys[0]):
        raise UnsupportedModuleError(
            f"{name} gives different results for the same input in eval mode; a "
            f"random forward has no gradient to speak of. Switch the randomness off "
            f"when module.training is False."
        )
    notes = (
        watch.notes
        + batch_dependence(loss, shaken, xs, ys, rounding)
        + gradient_hooks(loss)
    )
    with _precisely(loss, at, xs, ys, watch) as (at, xs, ys), loss.holding():
        comparison = in_general_position(loss, at, shaken, xs, ys, rounding)
        slow, error = attempt(comparison.reference)
        push: Product = pushed
        pull: Product = pulled
        why = ""
        if path != "loop":
            push, pull, failure = comparison.ways(slow)
            if failure is not None:
                culprit = culprit_of(loss.module, failure.product, watch)
                why = f"torch.func {failure.text}{culprit}{failure.detail}"
        if why and path == "vmap":
            raise UnsupportedModuleError(
                f"path='vmap' was asked for, but {name} can't be evaluated that way: "
                f"{why}. Use path='auto' or path='loop'."
            )
        chosen: Literal["vmap", "loop"] = "loop" if why or path == "loop" else "vmap"
        if chosen == "loop" and error is None:
            _, error = attempt(comparison.by_loop)
        if chosen == "loop" and error is not None:
            culprit = culprit_of(loss.module, comparison.by_loop, watch)
            raise UnsupportedModuleError(
                f"{name} has no second derivative that autograd can form"
                f"{f': {why}' if why else ''}; sample by sample{culprit}: "
                f"{first_line(error)}. Replace that operation{remedy(error)}, or "
                f"pass a criterion that avoids it."
            ) from error
        doubt, sharp = OK, False
        if comparison.conclusive:
            kinds = (xs.dtype, *watch.lower)
            eps = max(torch.finfo(kind).eps for kind in kinds)
            doubt, sharp = comparison.hidden_dependence(chosen, push, eps)
            if doubt == OK and slow is not None:
                doubt = comparison.without_derivative(slow[1])
    if doubt.word == "not computed":  # the forward was said to be in low precision
        doubt = doubt._replace(word="estimated")
    elif doubt != OK:
        notes.append(doubt.reason)
    notes += rounding.notes(x.dtype)
    conclusive = comparison.conclusive
    return Examination(chosen, push, pull, why, tuple(notes), conclusive, doubt, sharp)


@contextmanager
def _precisely(
    loss: SampleLoss, at: Weights, xs: Tensor, ys: Tensor, watch: ForwardWatch
) -> Iterator[tuple[Weights, Tensor, Tensor]]:
    """The samples and weights in float64, where device and module have it.

    A rule that is wrong by 1e-4 can't be told from rounding in float32.
    """
    if xs.dtype == torch.float64 or watch.rounds:
        yield at, xs, ys
        return
    with ExitStack() as stack:
        try:
            precise = stack.enter_context(
                evaluating(loss, xs.device.type, torch.float64)
            )
            ds = ys.double() if ys.is_floating_point() else ys
            again = watch_forward(loss, precise, xs.double(), ds)
        except UnsupportedModuleError:
            raise
        except Exception:
            again = watch
        if again is watch or again.rounds:
            stack.close()
            yield at, xs, ys
        else:
            yield precise, xs.double(), ds
