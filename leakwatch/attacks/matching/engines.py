"""Ways to form the gradients of many attacks, and the way back from them.

Gradients are at the network's own weights, or, for attacks on updates, at weights that
each attack has of its own. All ways give the same numbers; ``selection`` finds which
are right for a network and which of them is fastest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import grad, vmap

from leakwatch.derivatives.runtime import SampleLoss, Weights
from leakwatch.derivatives.safe_ops.substitutes import substituting

__all__ = [
    "AutogradGraph",
    "Graph",
    "LoopPath",
    "Path",
    "Pulled",
    "UpdatePath",
    "VmapPath",
    "by_name",
    "watched_norms",
]


class Pulled(NamedTuple):
    """Derivatives of ⟨c, g⟩ for gradients g and a cotangent c.

    Attributes:
        images: in the images.
        targets: in soft targets, if there are any.
        slope: along the direction of the weights that was asked for.
        weights: in the weights, where that was asked for.
    """

    images: Float[Tensor, "attacks images ..."]
    targets: Float[Tensor, "attacks images classes"] | None = None
    slope: Float[Tensor, " attacks"] | None = None
    weights: Float[Tensor, "attacks d_theta"] | None = None


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
        self,
        cotangent: Float[Tensor, "attacks d_theta"],
        extra: tuple[Tensor, Tensor] | None = None,
        *,
        along: Float[Tensor, "attacks d_theta"] | None = None,
        weights: bool = False,
    ) -> Pulled:
        """Derivatives of ⟨c, g⟩. Ends the graph.

        Args:
            cotangent: c, in the order of ``flat``.
            extra: another differentiable tensor and its cotangent.
            along: a direction of the weights, to ask for the derivative along it. This
                and the next only at weights of each attack's own.
            weights: whether to ask for the derivative in all weights.
        """


class Path(Protocol):
    """A way to form gradients at the network's own weights.

    Attributes:
        name: of the path.
        most: attacks that one call may hold, ``None`` for any number.
    """

    name: str
    most: int | None

    def graph(self, x: Tensor, y: Tensor, weight: Tensor, features: bool) -> Graph:
        """Gradients of each attack's mean loss, each sample alone in its batch.

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


class UpdatePath(Protocol):
    """A way to form gradients at each attack's own weights.

    Attributes:
        name: of the path.
    """

    name: str

    def graph_at(self, w: Tensor, x: Tensor, y: Tensor) -> Graph:
        """Gradients of each attack's mean loss over its images, in one batch.

        Args:
            w: weights of each attack, ``(attacks, d_θ)``.
            x: images, ``(attacks, images, *sample)``.
            y: labels, ``(attacks, images)``.

        Returns:
            A graph in the order of parameters.
        """


@final
class AutogradGraph:
    """A graph by autograd. See :class:`Graph`.

    Args:
        x: images, ``(attacks, images, *sample)``.
        y: labels or soft targets.
        flat: gradients with their graph, ``(attacks, d_θ)``.
        features: see :class:`Graph`.
        w: weights of each attack's own, if they have some.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        flat: Tensor,
        features: tuple[Tensor, ...] = (),
        w: Tensor | None = None,
    ) -> None:
        self._x, self._y, self._w = x, y, w
        self._flat = flat
        self.flat = flat.detach()
        self.features = features

    @substituting
    def pull(
        self,
        cotangent: Tensor,
        extra: tuple[Tensor, Tensor] | None = None,
        *,
        along: Tensor | None = None,
        weights: bool = False,
    ) -> Pulled:
        """See :class:`Graph`."""
        inputs = [self._x]
        if self._y.requires_grad:
            inputs.append(self._y)
        if self._w is not None and (weights or along is not None):
            inputs.append(self._w)
        pairs = [(self._flat, cotangent)] + ([] if extra is None else [extra])
        pairs = [(out, c) for out, c in pairs if out.requires_grad]
        if not pairs:  # the gradient doesn't depend on the images at all
            received = [torch.zeros_like(t) for t in inputs]
        else:
            received = list(
                torch.autograd.grad(
                    [out for out, _ in pairs],
                    inputs,
                    [c for _, c in pairs],
                    allow_unused=True,
                    materialize_grads=True,
                )
            )
        by_input = dict(zip(map(id, inputs), received, strict=True))
        of_w = by_input.get(id(self._w))
        return Pulled(
            received[0],
            by_input.get(id(self._y)),
            None if along is None or of_w is None else torch.linalg.vecdot(of_w, along),
            of_w if weights else None,
        )


@final
class _LoopedGraph:
    """Graphs of one attack each. See :class:`Graph`."""

    features: tuple[Tensor, ...] = ()

    def __init__(self, each: list[AutogradGraph]) -> None:
        self._each = each
        self.flat = torch.cat([graph.flat for graph in each])

    def pull(
        self,
        cotangent: Tensor,
        extra: tuple[Tensor, Tensor] | None = None,
        *,
        along: Tensor | None = None,
        weights: bool = False,
    ) -> Pulled:
        """See :class:`Graph`."""
        rows = [
            graph.pull(
                cotangent[i : i + 1],
                along=None if along is None else along[i : i + 1],
                weights=weights,
            )
            for i, graph in enumerate(self._each)
        ]

        def joined(parts: list[Tensor | None]) -> Tensor | None:
            whole = [t for t in parts if t is not None]
            return torch.cat(whole) if whole else None

        return Pulled(
            torch.cat([row.images for row in rows]),
            joined([row.targets for row in rows]),
            joined([row.slope for row in rows]),
            joined([row.weights for row in rows]),
        )


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
        return AutogradGraph(x, y, _flat(parts.values(), len(x)), kept)


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
        kept_by_layer = tuple(torch.cat(inputs)[None] for inputs in layers)
        # Times one: see `leakwatch.derivatives.autodiff.graph`.
        flat = _flat([1 * p[None] for p in parts], 1)
        return AutogradGraph(x, y, flat, kept_by_layer)

    def graph_at(self, w: Tensor, x: Tensor, y: Tensor) -> Graph:
        """See :class:`UpdatePath`."""
        rows = [slice(i, i + 1) for i in range(len(x))]
        return _LoopedGraph([self._single(w[i], x[i], y[i]) for i in rows])

    @substituting
    def _single(self, w: Tensor, x: Tensor, y: Tensor) -> AutogradGraph:
        w = w.detach().requires_grad_()
        x = x.detach().requires_grad_()
        named = {k: t[0] for k, t in by_name(self._at, w).items()}
        buffers = {name for name, _ in self._loss.named_buffers()}
        fixed = {k: t.clone() if k in buffers else t for k, t in self._at.fixed.items()}
        total = self._loss.batch(named | fixed, x[0].clone(), y[0]).mean()
        if not total.requires_grad:
            return AutogradGraph(x, y, torch.zeros_like(w), w=w)
        (g,) = torch.autograd.grad(
            total, w, create_graph=True, allow_unused=True, materialize_grads=True
        )
        return AutogradGraph(x, y, g, w=w)


def by_name(at: Weights, flat: Tensor) -> dict[str, Tensor]:
    """Rows of flat parameters by name, each in its shape, ``(rows, *shape)``.

    Args:
        at: names and shapes.
        flat: ``(rows, d_θ)``.
    """
    sizes = [p.numel() for p in at.shared.values()]
    pieces = zip(at.shared.items(), torch.split(flat, sizes, 1), strict=True)
    return {name: t.reshape(len(flat), *p.shape) for (name, p), t in pieces}


def _flat(parts: Iterable[Tensor], attacks: int) -> Tensor:
    return torch.cat([p.reshape(attacks, -1) for p in parts], 1)


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
