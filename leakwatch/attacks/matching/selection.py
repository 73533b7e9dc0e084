"""Which path is right for a network, and of those a fast one, found by trying."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from leakwatch.attacks.matching.engines import LoopPath, Path, VmapPath
from leakwatch.attacks.matching.layerwise import LayerwisePath
from leakwatch.derivatives.layers.modules import NotLayerwiseError, layouts
from leakwatch.derivatives.runtime import SampleLoss, UnsupportedModuleError, Weights
from leakwatch.status import describe_error

__all__ = ["PathName", "choose", "known"]

PathName: TypeAlias = Literal["auto", "layerwise", "vmap", "loop"]

_log = logging.getLogger(__name__)

# Agreement with the loop, relative: well above rounding, well below any mistake.
_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-9}
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
    builders = _builders(loss, at, wanted, x)
    loop = LoopPath(loss, at)
    if wanted == "loop":
        return loop
    right: list[Path] = []
    reasons: dict[str, list[str]] = {}
    with loss.holding():
        reference = _reference(loop, x, y)
    for name, build in builders.items():
        try:
            path = build()
            reason = "" if reference is None else reference(path)
        # Anything may come out of a network that a path can't take.
        except Exception as error:
            reason = describe_error(error)
        if reason:
            reasons.setdefault(reason, []).append(name)
        else:
            right.append(path)
    if not right:
        why = "; ".join(
            f"{' and '.join(names)}: {reason}" for reason, names in reasons.items()
        )
        if wanted != "auto":
            raise UnsupportedModuleError(
                f"{type(loss.module).__name__} can't be attacked by path={wanted!r} "
                f"({why}); use path='auto'."
            )
        _log.warning(
            "leakwatch attacks %s sample by sample, which is slower: %s.",
            type(loss.module).__name__,
            why,
        )
        return loop
    seconds = _seconds(cost, right)
    best = 0
    for i, taken in enumerate(seconds):
        if taken < _GAIN * seconds[best]:
            best = i
    return right[best]


def known(
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
        found = _compared_at(loop, x[rows].detach() + move * noise, targets, generator)
        if found is not None:
            return found
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
    back = torch.cat([g.pull(u[i : i + 1])[0] for i, g in enumerate(graphs)])
    if not bool(torch.isfinite(back).all()):
        return None

    def check(path: Path) -> str:
        graph = path.graph(images, y, weight, False)
        found = path.restore(graph.flat)
        wrong = max(
            _relative(found, expected),
            _relative(graph.pull(path.arrange(u))[0], back),
        )
        if wrong <= _TOLERANCE[images.dtype]:
            return ""
        return f"its values differ from the loop's by {wrong:.0e}"

    return check


def _relative(found: Tensor, expected: Tensor) -> float:
    """Largest relative difference of any attack; NaN counts as infinite."""
    a, b = found.flatten(1).double(), expected.flatten(1).double()
    wrong = (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-30)
    return float(torch.nan_to_num(wrong, nan=math.inf).max())


def _seconds(cost: Callable[[Path], object], paths: list[Path]) -> list[float]:
    """The fastest of some calls of each, in turns: a machine's speed drifts."""
    fastest = [math.inf] * len(paths)
    if len(paths) == 1:
        return fastest
    for round_ in range(4):
        for i, path in enumerate(paths):
            started = time.perf_counter()
            cost(path)
            taken = time.perf_counter() - started
            if round_ > 0 or taken > _LONG:  # the first call warms up
                fastest[i] = min(fastest[i], taken)
        if max(fastest) < math.inf and min(fastest) > _LONG:
            break
    return fastest
