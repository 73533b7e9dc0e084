"""First and mixed second derivatives of one sample's loss, in two independent ways.

With ℓ(θ, x) the loss of a sample and g = ∂ℓ/∂θ, J = ∂g/∂x, the functions here give
g, J v and Jᵀ u by ``torch.func``, which can be batched with ``vmap``, and by plain
autograd with double backward, which any eager code allows.

``torch.func`` has two ways for each product. With forward mode (`pushed`, `pulled`)
they are the cheaper ones, up to four times where weight gradients are large. Without
(`pushed_by_reverse`, `pulled_by_reverse`) they exist for more operations and are more
often right: in Torch 2.14 `pulled` is wrong, with no error, for layer normalisation,
batch statistics and determinants, whose forward-mode rules hide part of themselves
from a backward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.func import grad, jvp

from leakwatch.derivatives.runtime import Weights

__all__ = [
    "Graph",
    "LossFunction",
    "Product",
    "gradient",
    "gradient_by_graph",
    "graph",
    "pulled",
    "pulled_back",
    "pulled_by_graph",
    "pulled_by_reverse",
    "pushed",
    "pushed_by_graph",
    "pushed_by_reverse",
    "pushed_forward",
]

with warnings.catch_warnings():
    # The first jvp of a process loads rules that Torch scripts, and warns its own
    # users about torch.jit while doing so.
    warnings.simplefilter("ignore", FutureWarning)
    jvp(torch.sin, (torch.zeros(()),), (torch.zeros(()),))

Graph: TypeAlias = tuple[Tensor, Tensor]
"""An input as a leaf, and g as a differentiable function of it."""


class LossFunction(Protocol):
    """ℓ of one sample as a function of everything, see ``SampleLoss.sample``."""

    def __call__(
        self,
        shared: dict[str, Tensor],
        fixed: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
        weight: Tensor | None = None,
    ) -> Tensor:
        """The loss, differentiable in weights and input.

        Args:
            shared: parameters that require gradients, by name.
            fixed: all other parameters and buffers.
            x: one network input, without a batch dimension.
            y: its label.
            weight: factor on the loss.

        Returns:
            A scalar.
        """


Product: TypeAlias = Callable[
    [LossFunction, Weights, Tensor, Tensor, Tensor, Tensor], Tensor
]
"""J v or Jᵀ u as a function of loss, weights, x, y, weight of the loss, v or u."""


def gradient(
    loss: LossFunction, at: Weights, x: Tensor, y: Tensor, w: Tensor
) -> Tensor:
    """g, flat, by torch.func."""
    g = grad(loss)(at.shared, at.fixed, x, y, w)
    return torch.cat([g[name].reshape(-1) for name in at.shared])


def pushed(
    loss: LossFunction, at: Weights, x: Tensor, y: Tensor, w: Tensor, v: Tensor
) -> Tensor:
    """J v by torch.func: the tangent of g."""
    out: Tensor = jvp(lambda q: gradient(loss, at, q, y, w), (x,), (v,))[1]
    return out


def pulled(
    loss: LossFunction, at: Weights, x: Tensor, y: Tensor, w: Tensor, u: Tensor
) -> Tensor:
    """Jᵀ u, flat, by torch.func: ∇_x of the slope of ℓ along u."""
    parts = torch.split(u, [p.numel() for p in at.shared.values()])
    towards = {
        # In memory of its own: complex numbers can't begin at an odd position.
        name: part.view(p.shape).clone()
        for (name, p), part in zip(at.shared.items(), parts, strict=True)
    }

    def slope(q: Tensor) -> Tensor:
        out: Tensor = jvp(
            lambda p: loss(p, at.fixed, q, y, w), (at.shared,), (towards,)
        )[1]
        return out

    out: Tensor = grad(slope)(x)
    return out.reshape(-1)


def pulled_by_reverse(
    loss: LossFunction, at: Weights, x: Tensor, y: Tensor, w: Tensor, u: Tensor
) -> Tensor:
    """Jᵀ u, flat, by torch.func: ∇_x of ⟨g, u⟩."""
    out: Tensor = grad(lambda q: gradient(loss, at, q, y, w) @ u)(x)
    return out.reshape(-1)


def pushed_by_reverse(
    loss: LossFunction, at: Weights, x: Tensor, y: Tensor, w: Tensor, v: Tensor
) -> Tensor:
    """J v by torch.func: ∇_u of ⟨Jᵀ u, v⟩, which is linear in u."""

    def image(u: Tensor) -> Tensor:
        return pulled_by_reverse(loss, at, x, y, w, u) @ v.reshape(-1)

    out: Tensor = grad(image)(x.new_zeros(at.size))
    return out


def graph(loss: LossFunction, at: Weights, x: Tensor, y: Tensor, w: Tensor) -> Graph:
    """The graph of g, by autograd."""
    leaf = x.detach().clone().requires_grad_()
    # A forward may renormalise its weights in place.
    shared = {k: p.detach().clone().requires_grad_() for k, p in at.shared.items()}
    value = loss(shared, at.fixed, leaf, y, w)
    if not value.requires_grad:
        return leaf, leaf.new_zeros(at.size)
    g = torch.autograd.grad(
        value,
        list(shared.values()),
        create_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    # Times one: what comes back to each is then no part of u, see `pulled`.
    return leaf, torch.cat([1 * part.reshape(-1) for part in g])


def pulled_back(sample: Graph, u: Tensor, create_graph: bool = False) -> Tensor:
    """Jᵀ u, shaped like the input, by autograd."""
    leaf, g = sample
    if not g.requires_grad:  # the gradient doesn't depend on the input at all
        return torch.zeros_like(leaf)
    return torch.autograd.grad(
        g,
        leaf,
        u,
        create_graph=create_graph,
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )[0]


def pushed_forward(sample: Graph, vs: Tensor) -> Tensor:
    """J v for each v by autograd: differentiates u ↦ Jᵀ u, which is linear, in u."""
    u = torch.zeros_like(sample[1], requires_grad=True)
    back = pulled_back(sample, u, create_graph=True)
    if not back.requires_grad:
        return u.new_zeros(len(vs), u.numel())
    rows = [
        torch.autograd.grad(
            back, u, v, retain_graph=True, allow_unused=True, materialize_grads=True
        )[0]
        for v in vs
    ]
    return torch.stack(rows)


def gradient_by_graph(
    loss: LossFunction, at: Weights, x: Tensor, y: Tensor, w: Tensor
) -> Tensor:
    """g, flat, by autograd."""
    return graph(loss, at, x, y, w)[1].detach()


def pushed_by_graph(
    loss: LossFunction, at: Weights, x: Tensor, y: Tensor, w: Tensor, v: Tensor
) -> Tensor:
    """J v by autograd."""
    return pushed_forward(graph(loss, at, x, y, w), v[None])[0]


def pulled_by_graph(
    loss: LossFunction, at: Weights, x: Tensor, y: Tensor, w: Tensor, u: Tensor
) -> Tensor:
    """Jᵀ u, flat, by autograd."""
    return pulled_back(graph(loss, at, x, y, w), u).reshape(-1)
