"""Which layer gives a sample away: H = Σ_l J_lᵀJ_l, layer by layer."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from leakwatch.derivatives.gradient_map import GradientMap
from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.derivatives.parameter_filters import ParameterFilter
from leakwatch.derivatives.runtime import Criterion, Prepare

__all__ = ["LayerTable", "layer_attribution"]


@final
@dataclass(frozen=True, eq=False)
class LayerTable:
    """What each layer adds to H = JᵀJ of each sample.

    Attributes:
        layers: names of the modules that hold shared parameters, in the order of the
            gradient; empty for parameters of the network itself.
        parameters: how many shared numbers each has.
        trace: trace of H_l = J_lᵀJ_l, ``(batch, layers)``, float64, at least 0, in
            (gradient units / input units)²; NaN for a sample without finite gradient.
            These add up to the trace of H.
        largest: λ_1 of H_l, ``(batch, layers)``, likewise; ``None`` unless asked for.
            These do not add up: λ_1 of H lies between the largest of them and their
            sum.
    """

    layers: tuple[str, ...]
    parameters: tuple[int, ...]
    trace: Float[Tensor, "batch layers"]
    largest: Float[Tensor, "batch layers"] | None = None

    @property
    def share(self) -> Float[Tensor, "batch layers"]:
        """Of the trace of H, between 0 and 1; NaN where that is zero."""
        return self.trace / self.trace.sum(1, keepdim=True)

    def __str__(self) -> str:
        """A table, means over the samples."""
        share = self.share.nanmean(0).tolist()
        columns = [
            ["layer", *(name or "(network)" for name in self.layers)],
            ["parameters", *(f"{n:,}" for n in self.parameters)],
            ["share of Σλ", *(f"{s:.1%}" for s in share)],
        ]
        if self.largest is not None:
            largest = self.largest.nanmean(0).tolist()
            columns.append(["λ₁", *(f"{v:.3g}" for v in largest)])
        widths = [max(map(len, column)) for column in columns]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in zip(*columns, strict=True)
        )


def layer_attribution(
    module: nn.Module,
    x: Float[Tensor, "batch ..."],
    y: Shaped[Tensor, "batch ..."],
    *,
    largest: bool = False,
    input_scale: Float[Tensor, " d_x"] | None = None,
    criterion: Criterion | None = None,
    prepare: Prepare | None = None,
    parameters: ParameterFilter | None = None,
    dtype: torch.dtype = torch.float32,
    max_memory: float | None = None,
) -> LayerTable:
    """Which layer leaks: the part of each layer in H = JᵀJ, exact.

    The gradient is the gradients of all layers side by side, so H is the sum of
    H_l = J_lᵀJ_l over them. A client that shares some layers only leaks by the sum over
    those: its scores are those of ``leakwatch.score(..., parameters=...)``.

    Args:
        module: the network, on any device; left as it was. ``forward(x)`` gives
            logits, unless ``criterion`` says otherwise.
        x: network inputs.
        y: labels.
        largest: also find λ_1 of each H_l; costs another sum of inner products.
        input_scale: d(input)/d(pixel) of each input element, normally 1/std of the
            normalisation. Default 1.
        criterion: ``criterion(module, x, y)`` → one loss per sample.
        prepare: what becomes of a batch of inputs before the network gets it, as in
            :class:`GradientMap`.
        parameters: which parameters are shared, as in :class:`GradientMap`.
        dtype: arithmetic of J, float32 or float64; H is summed in float64.
        max_memory: MiB that may be kept of J of one sample at a time.

    Returns:
        The table.

    Raises:
        ValueError: for bad arguments, as :class:`GradientMap`.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Sigmoid(),
        ...                           torch.nn.Linear(6, 3))
        >>> table = layer_attribution(net, torch.rand(2, 4), torch.tensor([0, 2]))
        >>> table.layers, table.parameters, table.trace.shape
        (('0', '2'), (30, 21), torch.Size([2, 2]))
    """
    gradients = GradientMap(
        module, criterion, prepare=prepare, parameters=parameters, dtype=dtype
    )
    x, y = gradients.checked(x, y)
    jacobian = GradientJacobian(gradients, x, y, input_scale=input_scale)
    counts: Counter[str] = Counter()
    for name, size in gradients.sizes().items():
        counts[name.rpartition(".")[0]] += size
    rows, tops = [], []
    for sample, scale in enumerate(jacobian.scale.square().tolist()):
        h = jacobian.gram(sample, max_memory=max_memory, by_layer=largest)
        rows.append([h.traces[name] * scale for name in counts])
        # A layer of which nothing had to be kept adds nothing to H.
        none = {name: math.nan if t else 0.0 for name, t in h.traces.items()}
        tops.append([(none | h.largest)[name] * scale for name in counts])
    return LayerTable(
        tuple(counts),
        tuple(counts.values()),
        torch.tensor(rows, dtype=torch.float64),
        torch.tensor(tops, dtype=torch.float64) if largest else None,
    )
