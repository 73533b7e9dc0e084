"""Ways to form the gradients of many attacks, differentiable in their images.

All give the same numbers; ``selection`` measures which is fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from leakwatch.derivatives.runtime import SampleLoss, Weights
from leakwatch.derivatives.safe_ops.substitutes import substituting

__all__ = ["Graph", "LoopPath", "Path", "PlainGraph", "VmapPath", "watched_norms"]


class Graph(Protocol):
    """Gradients of some attacks, and the way back to their images.

    Attributes:
        flat: gradients, ``(attacks, d_θ)``, in the path's own order, detached. The
            caller may overwrite them.
        features: inputs of each BatchNorm layer, ``(attacks, images, channels, …)``,
            attached to the images; empty unless asked for.
    """

    flat: Tensor
    features: tuple[Tensor, ...]

    def pull(
        self, cotangent: Tensor, extra: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Derivative in images and targets. Ends the graph.

        Args:
            cotangent: of ``flat``.
            extra: another differentiable tensor and its cotangent.

        Returns:
            Derivative in the images, and in soft targets if there are any.
        """


class Path(Protocol):
    """A way to form gradients.

    Attributes:
        name: of the path.
        most: attacks that one call may hold, ``None`` for any number.
    """

    name: str
    most: int | None

    def graph(self, x: Tensor, y: Tensor, weight: Tensor, features: bool) -> Graph:
        """Gradients of each attack's mean loss.

        Args:
            x: images, ``(attacks, images, *sample)``.
            y: labels ``(attacks, images)`` or soft targets
                ``(attacks, images, classes)``, differentiated when they require it.
            weight: factor on each attack's loss.
            features: whether the inputs of BatchNorm layers are kept.
        """

    def arrange(self, flat: Tensor) -> Tensor:
        """Gradients in the order of parameters, in the path's own order."""

    def restore(self, flat: Tensor) -> Tensor:
        """The inverse of :meth:`arrange`."""


@final
class PlainGraph:
    """A graph by autograd. See :class:`Graph`."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        parts: list[Tensor],
        features: tuple[Tensor, ...] = (),
    ) -> None:
        self._inputs = [x, y] if y.requires_grad else [x]
        self._flat = torch.cat([p.reshape(len(x), -1) for p in parts], 1)
        self.flat = self._flat.detach()
        self.features = features

    @substituting
    def pull(
        self, cotangent: Tensor, extra: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`Graph`."""
        pairs = [(self._flat, cotangent)] + ([] if extra is None else [extra])
        pairs = [(out, c) for out, c in pairs if out.requires_grad]
        if not pairs:  # the gradient doesn't depend on the images at all
            found = [torch.zeros_like(t) for t in self._inputs]
        else:
            found = list(
                torch.autograd.grad(
                    [out for out, _ in pairs],
                    self._inputs,
                    [c for _, c in pairs],
                    allow_unused=True,
                    materialize_grads=True,
                )
            )
        return found[0], found[1] if len(found) > 1 else None


class _Ordered:
    """Paths that keep the order of parameters."""

    def arrange(self, flat: Tensor) -> Tensor:
        return flat

    def restore(self, flat: Tensor) -> Tensor:
        return flat


@final
class VmapPath(_Ordered):
    """``torch.func.grad`` of each attack under ``vmap``, then one plain backward.

    Args:
        loss: module and criterion, inside an evaluation.
        at: its weights.
    """

    name = "vmap"
    most: int | None = None

    def __init__(self, loss: SampleLoss, at: Weights) -> None:
        self._loss = loss
        self._at = at

    @substituting
    def graph(self, x: Tensor, y: Tensor, weight: Tensor, features: bool) -> Graph:
        """See :class:`Path`."""
        x = x.detach().requires_grad_()
        with watched_norms(self._loss if features else None) as seen:

            def single(shared: dict[str, Tensor], xi: Tensor, yi: Tensor) -> Any:
                seen.clear()
                value = self._loss.sample(shared, self._at.fixed, xi, yi)
                return value, tuple(seen)

            def mean(
                shared: dict[str, Tensor], xs: Tensor, ys: Tensor, w: Tensor
            ) -> Any:
                if len(xs) == 1:
                    value, kept = single(shared, xs[0], ys[0])
                    return value * w, tuple(k[None] for k in kept)
                each = vmap(single, in_dims=(None, 0, 0))
                values, kept = each(shared, xs, ys)
                return values.mean() * w, kept

            one = grad(mean, has_aux=True)
            parts, kept = vmap(one, in_dims=(None, 0, 0, 0))(
                self._at.shared, x, y, weight
            )
        # Each sample was alone in its batch.
        kept = tuple(k.flatten(2, 3) if k.ndim > 4 else k.flatten(1, 2) for k in kept)
        return PlainGraph(x, y, list(parts.values()), kept)


@final
class LoopPath(_Ordered):
    """One attack at a time by double backward, which any eager code allows.

    Args:
        loss: module and criterion, inside an evaluation.
        at: its weights.
    """

    name = "loop"
    most: int | None = 1

    def __init__(self, loss: SampleLoss, at: Weights) -> None:
        self._loss = loss
        self._at = at

    @substituting
    def graph(self, x: Tensor, y: Tensor, weight: Tensor, features: bool) -> Graph:
        """See :class:`Path`; for exactly one attack."""
        x = x.detach().requires_grad_()
        shared = {
            k: p.detach().clone().requires_grad_() for k, p in self._at.shared.items()
        }
        kept: list[list[Tensor]] = []
        total = x.new_zeros(())
        with watched_norms(self._loss if features else None) as seen:
            for xi, yi in zip(x[0], y[0], strict=True):
                seen.clear()
                total = total + self._loss.sample(shared, self._at.fixed, xi, yi)
                kept.append(list(seen))
        total = total * (weight[0] / x.shape[1])
        if total.requires_grad:
            parts = torch.autograd.grad(
                total,
                list(shared.values()),
                create_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        else:
            parts = tuple(torch.zeros_like(p) for p in shared.values())
        layers = zip(*kept, strict=True)
        return PlainGraph(
            x,
            y,
            [p[None] for p in parts],
            tuple(torch.cat(inputs)[None] for inputs in layers),
        )


@contextmanager
def watched_norms(loss: SampleLoss | None, modules: bool = False) -> Iterator[Any]:
    """Lists what BatchNorm layers with running statistics get, in order of call.

    Args:
        loss: module and criterion; ``None`` to list nothing.
        modules: to list the layers themselves instead of their inputs.

    Yields:
        The list, filled by each forward until it is cleared.
    """
    seen: list[Any] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(module if modules else args[0])

    handles = [
        m.register_forward_pre_hook(note)
        for m in ([] if loss is None else loss.modules())
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
