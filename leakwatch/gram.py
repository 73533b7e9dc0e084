"""H = JᵀJ of one sample in float64, without forming J where a layer allows it.

Forward-mode tangents along every input direction give J column by column. For most
parameters the column is formed as it is. For a linear layer that sees one vector per
sample the gradient is an outer product, G = δ aᵀ, and so its tangent
Ġ = Δ aᵀ + δ Aᵀ is known from the tangents Δ, A of its two factors. Inner products
follow without forming Ġ:

    ⟨Ġ_i, Ġ_j⟩ = ‖a‖² Δ_i·Δ_j + ‖δ‖² A_i·A_j + p_i q_j + q_i p_j,
    p_i = Δ_i·δ,  q_i = A_i·a

(a with a 1 appended when there is a bias). That replaces out·in numbers per direction
by out + in: 4.8 thousand instead of 1.8 million for an MLP with two hidden layers
of 1,000. For a convolution, where a are the patches of its input and δ has a column for
each output position, the products become small matrices between Δ_i, Δ_j, A_i and A_j;
where that takes more operations than Ġ itself (many positions, few weights), both
terms of Ġ are one matrix product and one convolution over all directions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from leakwatch.chunking import in_chunks
from leakwatch.evaluation import Weights
from leakwatch.factors import Factors, Sum, Workspace, cheaper_by_factors
from leakwatch.gradients import GradientMap
from leakwatch.layers import (
    Hook,
    Tap,
    conv_gradient,
    conv_tangents,
    hooked,
    tappable,
)

__all__ = ["Gram", "Workspace", "columns_stored", "gram"]

_WHOLE = (
    "the whole Jacobian is formed, because the linear layers can't be taken apart; a "
    "weight may be read outside of its layer"
)
# One float64 copy of a column block of J.
_BLOCK_BYTES = 64 * 2**20
# A J that takes no more than this in float64 is kept in it from the start.
_WIDE_BYTES = 512 * 2**20
# Tangents of what goes into and comes out of layers, for one chunk of directions.
_CHUNK_BYTES = 128 * 2**20

# Relative; far above rounding, far below any real disagreement.
_CLOSE = 1e-4

# By layer, with "" for all parameters that are not taken apart; then by name.
_Parts: TypeAlias = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Gram:
    """H of one sample and the projection of its columns on the gradient.

    Attributes:
        h: JᵀJ, ``(d_x, d_x)``, float64.
        along: Jᵀĝ with ĝ = g/‖g‖, ``(d_x,)``, float64; the Hessian of the cosine
            distance is ``(h - along alongᵀ)/‖g‖²`` (LAVP, Theorem 4). Zero when the
            gradient vanishes.
        norm: ‖g‖, with the weight of the loss.
    """

    h: Float[Tensor, "d_x d_x"]
    along: Float[Tensor, " d_x"]
    norm: float


def gram(
    gradients: GradientMap,
    x: Float[Tensor, "*shape"],
    y: Shaped[Tensor, "*target"],
    *,
    weight: Float[Tensor, ""] | None = None,
    input_scale: Float[Tensor, " d_x"] | None = None,
    norm: float | None = None,
    workspace: Workspace | None = None,
) -> Gram:
    """H = JᵀJ of one sample: tangents in ``gradients.dtype``, products in float64.

    Args:
        gradients: the gradient map.
        x: one network input, without a batch dimension.
        y: its label.
        weight: factor on the loss, and so on J. Default 1.
        input_scale: d(input)/d(pixel) of each input element; turns J into a derivative
            with respect to pixels. Default 1.
        norm: ‖g‖ with the weight, where it is known; a check of the result.
        workspace: memory to use again over several samples of one network. The first
            sample is compared with plain derivatives, the others by ``norm`` only.

    Returns:
        H, Jᵀĝ and ‖g‖.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(3, 2)
        >>> at = GradientMap(net, dtype=torch.float64)
        >>> x, y = torch.rand(3), torch.tensor(1)
        >>> columns = at.dense(x, y, torch.eye(3))
        >>> torch.testing.assert_close(gram(at, x, y).h, columns @ columns.T)
    """
    n = x.numel()
    space = Workspace() if workspace is None else workspace
    scale = torch.ones(n) if input_scale is None else input_scale
    directions = torch.diag(scale.to(x.device, gradients.dtype)).view(n, *x.shape)
    w = None if weight is None else weight[None]
    with gradients.evaluation(x) as at:
        xs, ys = gradients.prepared(x[None], y[None])
        batched = gradients.resolve(at, xs, ys) == "vmap" and gradients.forward_mode
        if batched and _WHOLE not in gradients.notes:
            xi, yi = xs[0], ys[0]
            taps = tappable(gradients, at, xi, yi)
            if taps:
                wi = xi.new_ones(()) if weight is None else weight.to(xi)
                result = _assemble(
                    *_tapped(gradients, at, xi, yi, wi, directions, taps, space), space
                )
                if space.trusted and _same_norm(result, norm):
                    return result
                g = gradients(x[None], y[None], w)[0]
                v = _random_direction(n).to(directions)
                column = gradients.jvp(
                    x[None], y[None], (directions.view(n, n) @ v)[None], w
                )[0]
                if _agrees(result, g, v, column):
                    # A gradient that is zero or not finite shows nothing.
                    space.trusted = math.isfinite(result.norm) and result.norm > 0
                    return result
                gradients.note(_WHOLE)
    g = gradients(x[None], y[None], w)[0]
    columns = gradients.dense(x, y, directions.view(n, n), weight)
    return _assemble(columns, g, [], space)


def columns_stored(
    gradients: GradientMap, x: Float[Tensor, "*shape"], y: Shaped[Tensor, "*target"]
) -> int:
    """How many numbers :func:`gram` keeps for each input direction.

    Args:
        gradients: the gradient map.
        x: one network input, without a batch dimension.
        y: its label.

    Returns:
        d_θ where J is formed as it is; less where layers are taken apart.
    """
    with gradients.evaluation(x) as at:
        xs, ys = gradients.prepared(x[None], y[None])
        batched = gradients.resolve(at, xs, ys) == "vmap" and gradients.forward_mode
        if not batched or _WHOLE in gradients.notes:
            return at.size
        taps = tappable(gradients, at, xs[0], ys[0])
        saved = sum(
            tap.numbers - tap.output.numel() - tap.input.numel()
            for tap in taps.values()
            if cheaper_by_factors(tap, x.numel())
        )
        return at.size - saved


def _tapped(
    gradients: GradientMap,
    at: Weights,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    directions: Tensor,
    taps: dict[str, Tap],
    workspace: Workspace,
) -> tuple[Tensor, Tensor, list[Factors]]:
    """Columns of J and g for some parameters, factors of the layers for the others."""
    held = set().union(*(t.parameters for t in taps.values()))
    others = {k: p for k, p in at.shared.items() if k not in held}
    constant = at.fixed | {k: at.shared[k] for k in held}
    zeros = {name: x.new_zeros(t.output) for name, t in taps.items()}

    def loss(
        added: dict[str, Tensor], free: dict[str, Tensor], xi: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        seen: dict[str, Tensor] = {}

        def tap(name: str) -> Hook:
            def hook(
                module: nn.Module, args: tuple[Tensor, ...], out: Tensor
            ) -> Tensor:
                # A copy, because later code may write into the activation.
                seen[name] = args[0].clone()
                return out + added[name]

            return hook

        with hooked({name: (t.module, tap(name)) for name, t in taps.items()}):
            value = gradients.sample_loss(free, constant, xi, y, weight)
        return value, seen

    def factors(xi: Tensor, added: dict[str, Tensor]) -> _Parts:
        (delta, rest), seen = grad(loss, argnums=(0, 1), has_aux=True)(
            added, others, xi
        )
        return {"": rest} | {name: {"δ": delta[name], "a": seen[name]} for name in taps}

    def tangent(v: Tensor) -> _Parts:
        # Tangents of zero, where none at all would take torch a slow way to the same.
        out: _Parts = jvp(factors, (x, zeros), (v, zeros))[1]
        return out

    here = {
        layer: {key: t.detach() for key, t in parts.items()}
        for layer, parts in factors(x, zeros).items()
    }
    n = len(directions)
    apart = {k: t for k, t in taps.items() if cheaper_by_factors(t, n)}
    convs = {
        k: t.module
        for k, t in taps.items()
        if k not in apart and isinstance(t.module, nn.Conv2d)
    }
    g = [here[""][name].reshape(-1) for name in others]
    g += [conv_gradient(m, here[k]["a"], here[k]["δ"]) for k, m in convs.items()]
    width = sum(map(len, g))
    stored = sum(t.output.numel() + t.input.numel() for t in apart.values())
    wide = 8 * n * (width + stored) > _WIDE_BYTES
    kind = x.dtype if wide else torch.float64
    columns = workspace.empty("columns", n, width, x, kind)
    layers = {
        name: Factors(
            t,
            here[name]["δ"],
            here[name]["a"],
            workspace.empty(f"δ {name}", n, t.output.numel(), x, kind),
            workspace.empty(f"a {name}", n, t.input.numel(), x, kind),
        )
        for name, t in apart.items()
    }

    # Each chunk is written to its place at once: at these sizes copies cost as much
    # as the tangents.
    def fill(part: Tensor, rows: Tensor) -> Tensor:
        found = vmap(tangent)(part)
        place = slice(int(rows[0]), int(rows[-1]) + 1)
        block, start = columns[place], 0
        for name, p in others.items():
            stop = start + p.numel()
            block[:, start:stop] = found[""][name].reshape(len(part), -1)
            start = stop
        for name, m in convs.items():
            stop = start + taps[name].numbers
            a, delta = found[name]["a"][:, 0], found[name]["δ"][:, 0]
            conv_tangents(
                m, here[name]["a"], here[name]["δ"], a, delta, block[:, start:stop]
            )
            start = stop
        for name, layer in layers.items():
            layer.tangent_delta[place] = found[name]["δ"].reshape(len(part), -1)
            layer.tangent_a[place] = found[name]["a"].reshape(len(part), -1)
        return rows

    numbers = torch.arange(n, device=x.device)
    chunk = gradients.chunk(Weights(others, {}))
    each = x.itemsize * sum(t.output.numel() + t.input.numel() for t in taps.values())
    chunk = min(chunk, max(1, _CHUNK_BYTES // each))
    in_chunks(fill, (directions, numbers), chunk)
    return columns, torch.cat(g) if g else x.new_zeros(0), list(layers.values())


def _assemble(
    columns: Tensor, g: Tensor, layers: list[Factors], workspace: Workspace
) -> Gram:
    n = len(columns)
    total = Sum(n, columns, workspace)
    double = columns.dtype == torch.float64
    width = columns.shape[1] if double else _BLOCK_BYTES // (8 * n)
    for start in range(0, columns.shape[1], max(1, width)):
        block = columns[:, start : start + width].double()
        part = g[start : start + width].double()
        total.add_square(block)
        total.along += block @ part
        total.squared += part @ part
    for layer in layers:
        layer.add_to(total, workspace)
    norm = float(total.squared.sqrt())
    along = total.along / norm if norm > 0 else total.along
    return Gram(total.total(), along, norm)


def _agrees(result: Gram, g: Tensor, v: Tensor, column: Tensor) -> bool:
    """‖g‖, ‖J v‖ and ĝᵀJ v as autograd alone gives them, no layer taken apart."""
    g, v, column = g.double(), v.double(), column.double()
    norm, image = float(g.norm()), float(column.norm())
    expected = float((v @ result.h @ v).clamp_min(0).sqrt())
    along = float(g @ column) / norm if norm > 0 else 0.0
    close = _CLOSE * max(expected, image)
    return (
        _same_norm(result, norm)
        and abs(expected - image) <= close
        and abs(float(result.along @ v) - along) <= close
    ) or not math.isfinite(norm)


def _same_norm(result: Gram, norm: float | None) -> bool:
    return norm is None or abs(result.norm - norm) <= _CLOSE * norm


def _random_direction(n: int) -> Tensor:
    """Not a constant one, to which a network that centres its input is blind."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, generator=generator, dtype=torch.float64)
