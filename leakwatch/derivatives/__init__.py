"""The map from a sample to the gradient that it would share, and its derivatives.

Everything in leakwatch hangs off :class:`GradientMap`: its derivative gives every
score, matching its values gives every attack, perturbing them gives every defense. Its
parts, in an order in which they can be read, each on top of those before it:

- ``losses``, ``parameter_filters``: what is differentiated, and by which parameters;
- ``safe_ops``: operations whose derivatives torch loses, replaced by equal ones;
- ``runtime``: the conditions of an evaluation, and how all that it changes is undone;
- ``autodiff``: g, J v and Jᵀu of one sample, by torch.func and by plain autograd;
- ``verification``: which of these can be trusted, for this network;
- ``network``, ``gradient_map``: the map itself, for batches, verified at first use;
- ``layers``: a network taken apart at the calls of its weights;
- ``gram``: H = JᵀJ as a dense matrix, layer by layer;
- ``graph_products``: many products with J, Jᵀ and H, from graphs of its layers;
- ``jacobian``: J of a batch as an operator, which is what scores ask;
- ``attribution``: which layers leak.
"""

from __future__ import annotations

from leakwatch.derivatives.gradient_map import GradientMap
from leakwatch.derivatives.runtime import (
    Criterion,
    Prepare,
    UnsupportedModuleError,
    Weights,
    underlying,
)
from leakwatch.derivatives.verification import Path

__all__ = [
    "Criterion",
    "GradientMap",
    "Path",
    "Prepare",
    "UnsupportedModuleError",
    "Weights",
    "underlying",
]
