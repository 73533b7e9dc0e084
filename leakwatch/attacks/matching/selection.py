"""Which path is right for a network, and of those a fast one, found by trying."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Literal, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from leakwatch.attacks.matching.engines import LoopPath, Path, UpdatePath, VmapPath
from leakwatch.attacks.matching.layerwise import LayerwisePath
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.layers.modules import layouts
from leakwatch.derivatives.runtime import (
    SampleLoss,
    UnsupportedModuleError,
    Weights,
    evaluating,
)
from leakwatch.derivatives.runtime.clock import finished
from leakwatch.derivatives.runtime.modules import NotLayerwiseError
from leakwatch.derivatives.verification import refuse_stray_reads
from leakwatch.derivatives.verification.agreement import Quantity, agreement
from leakwatch.status import describe_error

__all__ = ["PathFor", "PathName", "UpdatePathName", "built", "choose", "opened"]

PathName: TypeAlias = Literal["auto", "layerwise", "vmap", "loop"]
UpdatePathName: TypeAlias = Literal["auto", "layers", "plain"]

PathFor: TypeAlias = Callable[[Tensor, Tensor, Tensor], UpdatePath]
"""Gives the path for weights, images and labels of some attacks on updates."""

_log = logging.getLogger(__name__)

# The images are moved by this to be compared: equal starts would hide that a network
# mixes the samples of a batch.
_MOVES = (0.3, 0.03, 0.0)
# Smaller gradients at the images that are compared say nothing.
_SMALLEST = 1e-30
# Another path must take at most this part of the time of the one before: paths round
# differently, and a choice by small differences would vary from run to run.
_GAIN = 0.7
# Seconds after which a measurement is not repeated.
_LONG = 0.5


class _Named(Protocol):
    name: str


_P = TypeVar("_P", bound=_Named)


def choose(
    loss: SampleLoss,
    at: Weights,
    wanted: PathName,
    x: Tensor,
    y: Tensor,
    cost: Callable[[Path], object],
) -> Path:
    """The fastest path that gives the values of the loop.

    Args:
        loss: module and criterion, inside an evaluation.
        at: its weights.
        wanted: ``"auto"``, or the only path that may be taken.
        x: images of some attacks, ``(attacks, images, *sample)``.
        y: their labels.
        cost: does with a path what the attack will do, to be timed.

    Returns:
        The path.

    Raises:
        UnsupportedModuleError: if the wanted path fails or gives other values.
    """
    loop = LoopPath(loss, at)
    if wanted == "loop":
        return loop
    with loss.holding():
        check = _reference(loop, x, y)
    builders = _builders(loss, at, wanted, x)
    right = _right_ones(builders, check, loss, wanted, "attacks %s sample by sample")
    if not right:
        return loop
    seconds = _seconds(cost, right, x.device)
    best = 0
    for i, taken in enumerate(seconds):
        if taken < _GAIN * seconds[best]:
            best = i
    return right[best]


def built(
    loss: SampleLoss, at: Weights, wanted: PathName, x: Tensor, name: str
) -> Path | None:
    """The path of a name that :func:`choose` gave before, if it can still be built.

    Args:
        loss: as in :func:`choose`.
        at: as in :func:`choose`.
        wanted: as in :func:`choose`.
        x: as in :func:`choose`.
        name: of the path.
    """
    build = _builders(loss, at, wanted, x).get(name)
    if name == LoopPath.name:
        return LoopPath(loss, at)
    try:
        return None if build is None else build()
    except NotLayerwiseError:  # parameters were frozen or released since
        return None


@contextmanager
def opened(gradients: GradientMap, name: UpdatePathName = "auto") -> Iterator[PathFor]:
    """The network, ready to be evaluated at any weights, set up once.

    Args:
        gradients: whose module and criterion are used; its own weights are not.
        name: ``"layers"``, ``"plain"`` for one attack after the other by double
            backward, or ``"auto"`` for layers where they are right.

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
            path = _for_update(loss, at, name, w, x, y)
            # Checkpointed parts of a forward run again during the backward pass.
            stack.enter_context(loss.holding())
            if isinstance(path, LayerwisePath):
                path.settle(x[0].detach(), y[0])
            return path

        yield path_for


def _for_update(
    loss: SampleLoss,
    at: Weights,
    wanted: UpdatePathName,
    w: Tensor,
    x: Tensor,
    y: Tensor,
) -> UpdatePath:
    refuse_stray_reads(loss, at, x[0], y[0])
    loop = LoopPath(loss, at)
    if wanted == "plain":
        return loop
    check = functools.partial(_difference, loop, w[:2], x[:2], y[:2])
    builders = {"layers": functools.partial(LayerwisePath, loss, at, None)}
    slow = "attacks updates of %s one by one"
    right = _right_ones(builders, check, loss, wanted, slow)
    return right[0] if right else loop


def _right_ones(
    builders: Mapping[str, Callable[[], _P]],
    check: Callable[[_P], str] | None,
    loss: SampleLoss,
    wanted: str,
    slow: str,
) -> list[_P]:
    """The paths that can be built and give the right values.

    Args:
        builders: by name.
        check: says what is wrong, empty for nothing; ``None`` if nothing can be said.
        loss: module and criterion.
        wanted: ``"auto"``, or the only path that may be taken.
        slow: what is done if there are none, for a warning.
    """
    right: list[_P] = []
    reasons: dict[str, list[str]] = {}
    for name, build in builders.items():
        try:
            path = build()
            reason = "" if check is None else check(path)
        # Anything may come out of a network that a path can't take.
        except Exception as error:
            reason = describe_error(error)
        if reason:
            reasons.setdefault(reason, []).append(name)
        else:
            right.append(path)
    if not right:
        kind = type(loss.module).__name__
        why = "; ".join(
            f"{' and '.join(names)}: {reason}" for reason, names in reasons.items()
        )
        if wanted != "auto":
            raise UnsupportedModuleError(
                f"{kind} can't be attacked by path={wanted!r} ({why}); use path='auto'."
            )
        _log.warning(f"leakwatch {slow}, which is slower: %s.", kind, why)
    return right


def _keep_freed_memory() -> None:
    # Each step asks for the memory that the step before has freed. The GNU allocator
    # learns from what is freed how much to keep, at most 64 MiB, instead of having the
    # system clear the same pages again and again: a third of a small step's time. Never
    # written to, this takes neither memory nor time.
    torch.empty(2**25 - 2**13, dtype=torch.uint8)


def _builders(
    loss: SampleLoss, at: Weights, wanted: PathName, x: Tensor
) -> dict[str, Callable[[], Path]]:
    """How the paths that may be taken are built, the likeliest first."""
    builders: dict[str, Callable[[], Path]] = {}
    if wanted in ("auto", "layerwise"):
        for layout in layouts(loss) if x.ndim == 5 else ("contiguous",):
            name = LayerwisePath.name_of(layout)
            builders[name] = functools.partial(LayerwisePath, loss, at, layout)
    if wanted in ("auto", "vmap"):
        builders[VmapPath.name] = functools.partial(VmapPath, loss, at)
    return builders


def _reference(loop: LoopPath, x: Tensor, y: Tensor) -> Callable[[Path], str] | None:
    """Compares a path with the loop on two attacks; ``None`` if nothing is finite."""
    rows = [0, min(1, len(x) - 1)]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, *x.shape[1:], generator=generator).to(x)
    targets = y[rows].detach().to(x.device)
    for move in _MOVES:
        check = _compared_at(loop, x[rows].detach() + move * noise, targets, generator)
        if check is not None:
            return check
    return None


def _compared_at(
    loop: LoopPath, images: Tensor, y: Tensor, generator: torch.Generator
) -> Callable[[Path], str] | None:
    each = [(images[i : i + 1], y[i : i + 1]) for i in range(len(images))]
    one = torch.ones(1, dtype=images.dtype, device=images.device)
    size = torch.stack([loop.graph(*pair, one, False).flat.norm() for pair in each])
    if not bool((torch.isfinite(size) & (size > _SMALLEST)).all()):
        return None
    weight = 1 / size
    graphs = [
        loop.graph(*pair, weight[i : i + 1], False) for i, pair in enumerate(each)
    ]
    expected = torch.cat([g.flat for g in graphs])
    u = torch.randn(expected.shape, generator=generator).to(expected)
    u /= u.norm(dim=1, keepdim=True)
    back = torch.cat([g.pull(u[i : i + 1]).images for i, g in enumerate(graphs)])
    if not bool(torch.isfinite(back).all()):
        return None

    def check(path: Path) -> str:
        graph = path.graph(images, y, weight, False)
        gradient = path.restore(graph.flat)
        pulled = graph.pull(path.arrange(u)).images
        return _wrong("attack's gradient", [(gradient, expected), (pulled, back)])

    return check


def _difference(
    loop: LoopPath, w: Tensor, x: Tensor, y: Tensor, path: UpdatePath
) -> str:
    """What is wrong with a path for updates, empty for nothing."""
    generator = torch.Generator().manual_seed(0)
    # Clients that start alike would hide that their samples are mixed up.
    x = x + 0.1 * torch.randn(x.shape, generator=generator).to(x)
    right = loop.graph_at(w, x, y)
    c, v = torch.randn(2, *w.shape, generator=generator).to(w)
    graph = path.graph_at(w, x, y)
    ours, theirs = (g.pull(c, along=v, weights=True) for g in (graph, right))
    pairs = [(graph.flat, right.flat), (ours.images, theirs.images)]
    if ours.weights is not None and theirs.weights is not None:
        pairs.append((ours.weights, theirs.weights))
    reason = _wrong("update's gradient", pairs)
    if reason or theirs.weights is None or ours.slope is None or theirs.slope is None:
        return reason
    # The slope is ⟨weights, v⟩, in which most may cancel.
    size = theirs.weights.norm(dim=1) * v.norm(dim=1)
    return _wrong("update's gradient", [(ours.slope, theirs.slope)], size)


def _wrong(
    quantity: Quantity, pairs: list[tuple[Tensor, Tensor]], size: Tensor | None = None
) -> str:
    """What is wrong with a path's values, compared with the loop's."""
    for fast, reference in pairs:
        verdict = agreement(fast, reference, quantity, size=size)
        if not verdict.conclusive:
            return "its values are not finite"
        if verdict.reason:
            return f"its values differ from the loop's by {verdict.relative:.0e}"
    return ""


def _seconds(
    cost: Callable[[Path], object], paths: list[Path], device: torch.device
) -> list[float]:
    """The fastest of some calls of each, in turns: a machine's speed drifts."""
    fastest = [math.inf] * len(paths)
    if len(paths) == 1:
        return fastest
    for round_ in range(4):
        for i, path in enumerate(paths):
            started = finished(device)
            cost(path)
            taken = finished(device) - started
            if round_ > 0 or taken > _LONG:  # the first call warms up
                fastest[i] = min(fastest[i], taken)
        if max(fastest) < math.inf and min(fastest) > _LONG:
            break
    return fastest
