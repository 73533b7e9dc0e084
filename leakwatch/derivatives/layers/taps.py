"""Which layers come apart: the calls that a forward makes with each weight.

A gradient of a weight is a sum of products of what goes into each call with the weight,
a, and of what comes back to it, δ: δᵀa for linear layers and convolutions, a sum of
δ·x̂ for the scale of a normalisation. Its tangent follows from the tangents A, Δ of the
two factors, Δᵀa + δᵀA.

The calls are seen where they are made, as functions of tensors, not at modules: so a
module may be called twice, a weight may be tied, or used by an attention that never
calls its projection's forward. A weight that anything else reads does not come apart.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from leakwatch.derivatives.gradient_map import GradientMap
from leakwatch.derivatives.layers.calls import Call, Use, use_of
from leakwatch.derivatives.runtime import Weights
from leakwatch.derivatives.safe_ops.convolution import ConstantConvolution


@final
@dataclass(frozen=True)
class Layer:
    """A weight that comes apart, with the bias that is used beside it.

    Attributes:
        weight: its full name.
        bias: full name of the bias; ``None`` without one, or when that is used
            elsewhere too.
        calls: all calls with it, in order.
        numbers: how many numbers its gradient has, with that of the bias.
    """

    weight: str
    bias: str | None
    calls: tuple[Call, ...]
    numbers: int

    @property
    def keys(self) -> tuple[str, ...]:
        """A name for each call."""
        return tuple(f"{self.weight}#{i}" for i in range(len(self.calls)))

    @property
    def names(self) -> tuple[str, ...]:
        """Full names of its parameters."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def listen(
    gradients: GradientMap, at: Weights, x: Tensor, y: Tensor
) -> tuple[dict[str, Layer], str]:
    """The layers that come apart for this sample.

    Args:
        gradients: the gradient map, inside its ``evaluation``.
        at: its weights.
        x: one sample, without a batch dimension.
        y: its label.

    Returns:
        Layers by the name of their weight, and the key of the last call.
    """
    reading = _Reading({id(p): name for name, p in at.shared.items()})
    with torch.no_grad(), reading:
        gradients.sample_loss(at.shared, at.fixed, x, y)
    layers: dict[str, Layer] = {}
    for name, weight in at.shared.items():
        calls = reading.calls.get(name)
        if calls is None or name in reading.otherwise:
            continue
        beside = reading.biases[name]
        bias = beside[0]
        # A bias belongs to the layer if all its uses are beside this weight.
        alone = bias is not None and all(b == bias for b in beside)
        if bias in reading.otherwise or not alone or reading.uses[bias] != len(calls):
            bias = None
        numbers = weight.numel() + (0 if bias is None else at.shared[bias].numel())
        layers[name] = Layer(name, bias, tuple(calls), numbers)
    last = [key for key in reading.order if key.split("#")[0] in layers]
    return layers, last[-1] if last else ""


@final
class Tapping(TorchFunctionMode):
    """Records inputs of the layers' calls and adds tensors to their outputs.

    Args:
        weights: id of each weight's tensor → name.
        added: key of a call → tensor to add to what it returns.
        wanted: keys of the calls whose inputs are recorded.
        last: key of a call whose output is recorded.

    Attributes:
        inputs: key → a.
        output: what the call ``last`` returned, ``None`` before.
    """

    def __init__(
        self,
        weights: Mapping[int, str],
        added: Mapping[str, Tensor],
        wanted: frozenset[str],
        last: str = "",
    ) -> None:
        super().__init__()
        self._weights, self._added, self._wanted = weights, added, wanted
        self._last = last
        self._count: Counter[str] = Counter()
        self.inputs: dict[str, Tensor] = {}
        self.output: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            with self:
                return _attention(*args, **kwargs)
        out = func(*args, **kwargs)
        use = use_of(func, args, kwargs)
        name = None if use is None else self._weights.get(id(use.weight))
        if use is None or name is None:
            return out
        key = f"{name}#{self._count[name]}"
        self._count[name] += 1
        if key in self._wanted:
            # A copy, because later code may write into the activation.
            self.inputs[key] = use.activation().clone()
        if key == self._last:
            self.output = out
        return out + self._added[key] if key in self._added else out


@final
class ConstantConvolutions(TorchFunctionMode):
    """Inside, convolutions with constant weights are :class:`ConstantConvolution`.

    Other modes that look at a network's calls belong inside of this one.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls ``func``, or what stands for it."""
        kwargs = kwargs or {}
        out = _constant(func, args, kwargs) if func in _CONVOLUTIONS else None
        return func(*args, **kwargs) if out is None else out


_CONVOLUTIONS = (torch.conv1d, torch.conv2d)


def _constant(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    use = use_of(func, args, kwargs)
    if use is None or use.weight is None or use.input.ndim != use.weight.ndim:
        return None
    parts = [t for t in (use.input, use.weight, use.bias) if t is not None]
    nested = any(map(torch._C._functorch.is_functorch_wrapped_tensor, parts))
    if nested or any(t.requires_grad for t in parts[1:]):
        return None
    flat = use.weight.ndim == 3
    weight = use.weight.unsqueeze(2) if flat else use.weight
    out = ConstantConvolution(weight, use.bias, **use.geometry)(use.activation())
    return out.squeeze(2) if flat else out


@final
class _Reading(TorchFunctionMode):
    """Notes every use of every parameter."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self.calls: dict[str, list[Call]] = {}
        self.biases: dict[str, list[str | None]] = {}
        self.uses: Counter[str | None] = Counter()
        self.order: list[str] = []
        self.otherwise: set[str | None] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            with self:
                return _attention(*args, **kwargs)
        out = func(*args, **kwargs)
        names = [
            self._names[id(t)] for t in _tensors((args, kwargs)) if id(t) in self._names
        ]
        if names and func not in _HARMLESS:
            self._note(use_of(func, args, kwargs), names, out)
        return out

    def _note(self, use: Use | None, names: list[str], out: Any) -> None:
        weight = None if use is None else self._names.get(id(use.weight))
        call = None if use is None or weight is None else use.call(out)
        if use is None or weight is None or call is None:
            self.otherwise.update(names)
            return
        bias = self._names.get(id(use.bias))
        self.otherwise.update(set(names) - {weight, bias})
        if names.count(weight) > 1:
            self.otherwise.add(weight)
        calls = self.calls.setdefault(weight, [])
        self.order.append(f"{weight}#{len(calls)}")
        calls.append(call)
        self.biases.setdefault(weight, []).append(bias)
        self.uses[bias] += 1


# What does not read a tensor's numbers.
_HARMLESS = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad")
    ),
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
}
# Torch's own function would hide the calls that it makes.
_attention = types.FunctionType(
    functional.multi_head_attention_forward.__code__,
    {**vars(functional), "has_torch_function": lambda _: False},
    "multi_head_attention_forward",
    functional.multi_head_attention_forward.__defaults__,
)


def _tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, dict):
        yield from _tensors(tuple(nested.values()))
    elif isinstance(nested, list | tuple):
        for part in nested:
            yield from _tensors(part)
