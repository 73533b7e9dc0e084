"""Gradients at weights of their own for many attacks, and the way back from them.

Both paths give the gradient g of each attack's loss at its own weights w, and for a
cotangent c of it the derivatives of ⟨c, g⟩ in images and weights. Nothing here forms a
derivative of all of g.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.derivatives.runtime import SampleLoss, Weights
from leakwatch.derivatives.safe_ops.substitutes import Substitutes

__all__ = ["PlainPath", "Pulled", "UpdateGraph", "UpdatePath", "by_name"]


class Pulled(NamedTuple):
    """Derivatives of ⟨c, g⟩.

    Attributes:
        images: in them.
        slope: along the direction that was asked for, ``(attacks,)``.
        weights: in the weights, where that was asked for, ``(attacks, d_θ)``.
    """

    images: Float[Tensor, "attacks images ..."]
    slope: Float[Tensor, " attacks"] | None
    weights: Float[Tensor, "attacks d_theta"] | None


class UpdateGraph(Protocol):
    """Gradients of some attacks, and the way back.

    Attributes:
        flat: gradients, ``(attacks, d_θ)``, detached.
    """

    flat: Tensor

    def pull(
        self,
        cotangent: Float[Tensor, "attacks d_theta"],
        *,
        along: Float[Tensor, "attacks d_theta"] | None = None,
        weights: bool = False,
    ) -> Pulled:
        """Derivatives of ⟨c, g⟩. Ends the graph.

        Args:
            cotangent: c.
            along: a direction of the weights, to ask for the derivative along it.
            weights: whether to ask for the derivative in all weights.
        """


class UpdatePath(Protocol):
    """A way to form gradients at each attack's own weights.

    Attributes:
        name: of the path.
    """

    name: str

    def graph(self, w: Tensor, x: Tensor, y: Tensor) -> UpdateGraph:
        """Gradients of each attack's mean loss over its images, in one batch.

        Args:
            w: weights of each attack, ``(attacks, d_θ)``.
            x: images, ``(attacks, images, *sample)``.
            y: labels, ``(attacks, images)``.
        """


@final
class PlainPath:
    """Double backward, one attack after the other, which any eager code allows.

    Args:
        loss: module and criterion, inside an evaluation.
        at: names and shapes of the weights.
    """

    name = "plain"

    def __init__(self, loss: SampleLoss, at: Weights) -> None:
        self._loss = loss
        self._at = at

    def graph(self, w: Tensor, x: Tensor, y: Tensor) -> UpdateGraph:
        """See :class:`UpdatePath`."""
        rows = [self._single(w[i], x[i], y[i]) for i in range(len(x))]
        return _PlainGraph(rows)

    def _single(self, w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        w = w.detach().requires_grad_()
        x = x.detach().requires_grad_()
        named = {k: t[0] for k, t in by_name(self._at, w[None]).items()}
        buffers = {name for name, _ in self._loss.named_buffers()}
        fixed = {k: t.clone() if k in buffers else t for k, t in self._at.fixed.items()}
        with Substitutes():
            total = self._loss.batch(named | fixed, x.clone(), y).mean()
            if not total.requires_grad:
                return x, w, torch.zeros_like(w)
            (g,) = torch.autograd.grad(
                total, w, create_graph=True, allow_unused=True, materialize_grads=True
            )
        return x, w, g


@final
class _PlainGraph:
    """See :class:`UpdateGraph`."""

    def __init__(self, rows: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        self._rows = rows
        self.flat = torch.stack([g.detach() for _, _, g in rows])

    def pull(
        self, cotangent: Tensor, *, along: Tensor | None = None, weights: bool = False
    ) -> Pulled:
        """See :class:`UpdateGraph`."""
        images, received = [], []
        for (x, w, g), c in zip(self._rows, cotangent, strict=True):
            inputs = [x, w] if weights or along is not None else [x]
            found: list[Tensor] = [torch.zeros_like(t) for t in inputs]
            if g.requires_grad:
                with Substitutes():
                    found = list(
                        torch.autograd.grad(
                            g, inputs, c, allow_unused=True, materialize_grads=True
                        )
                    )
            images.append(found[0])
            received.append(found[-1])
        every = None if len(inputs) == 1 else torch.stack(received)
        slope = None
        if along is not None and every is not None:
            slope = torch.linalg.vecdot(every, along)
        return Pulled(torch.stack(images), slope, every if weights else None)


def by_name(at: Weights, flat: Tensor) -> dict[str, Tensor]:
    """Rows of flat parameters by name, each in its shape, ``(rows, *shape)``.

    Args:
        at: names and shapes.
        flat: ``(rows, d_θ)``.
    """
    sizes = [p.numel() for p in at.shared.values()]
    pieces = zip(at.shared.items(), torch.split(flat, sizes, 1), strict=True)
    return {name: t.reshape(len(flat), *p.shape) for (name, p), t in pieces}
