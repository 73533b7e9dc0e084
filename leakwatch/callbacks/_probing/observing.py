"""The observer leaves no trace: a module is given back exactly as it was found."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, final

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from leakwatch.derivatives.runtime.rng_and_precision import (
    isolated_rng,
    plain_arithmetic,
)

__all__ = ["observing"]


@contextmanager
def observing(module: nn.Module) -> Iterator[None]:
    """Let the body use `module` freely and undo everything that it does to it.

    Restored, also after an exception:

    - every global random stream (`rng_and_precision.isolated_rng`);
    - arithmetic settings and other global flags
      (`rng_and_precision.plain_arithmetic`), which are also set inside: gradients
      on, inference mode and autocast off, full float32, plain attention;
    - of each submodule: its own `training` flag, the parameters, buffers and
      submodules registered with it, its plain attributes, and the contents of the
      lists, dicts, sets and deques among them, nested ones included;
    - of each buffer, and of each tensor in a plain attribute: identity and values;
    - what a `LightningModule` would log meanwhile is dropped;
    - of each parameter: identity, storage, `requires_grad` and `.grad`.

    Inside, every `.grad` is None, so that a backward pass can't add to a gradient
    that training is accumulating; afterwards the same tensors are back in place.

    Parameter values are not copied. The cost is one copy of the buffers. A body that
    writes into parameters in place, or a forward that writes into an object which is
    neither module, container nor tensor (an array, a helper class), is not undone.

    Args:
        module: any module; submodules held in plain lists count as well.

    Raises:
        TypeError: `module` is not an `nn.Module`.
        ValueError: a parameter or buffer has no shape yet (lazy modules).

    Example:
        >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        >>> with observing(net):
        ...     _ = net.eval()(torch.rand(4, 2)).sum().backward()
        >>> net.training, net[1].weight.grad is None
        (True, True)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"observing() got {type(module).__name__}; expected a torch.nn.Module"
        )
    tensors = list(chain(module.named_parameters(), module.named_buffers()))
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise ValueError(
                f"{name!r} has no shape yet; expected an initialised module: run one "
                "forward pass before observing it"
            )
    kinds = [tensor.device.type for _, tensor in tensors]
    device_type = next((kind for kind in kinds if kind != "cpu"), "cpu")
    with isolated_rng(), plain_arithmetic(device_type):
        snapshot = _Snapshot(module)
        try:
            snapshot.set_gradients_aside()
            _mute(module)
            yield
        finally:
            with torch.no_grad():
                snapshot.restore()


def _mute(module: nn.Module) -> None:
    """Keep a forward that calls ``self.log`` from changing the metrics of training.

    Set on the instance, so that the snapshot takes it away again.
    """
    for part in module.modules():
        if isinstance(part, LightningModule):
            vars(part).update(log=_ignore, log_dict=_ignore)


def _ignore(*_: object, **__: object) -> None:
    """Stands in for ``log`` and ``log_dict``."""


@final
class _Snapshot:
    """What a module and everything reachable from it through containers holds."""

    def __init__(self, module: nn.Module) -> None:
        self._modes: list[tuple[nn.Module, bool]] = []
        self._contents: list[tuple[Any, list[Any]]] = []
        self._values: list[tuple[Tensor, Tensor, Tensor]] = []
        self._parameters: list[tuple[nn.Parameter, Tensor, Tensor | None, bool]] = []
        seen: dict[int, Any] = {}
        waiting: list[Any] = [module]
        while waiting:
            item = waiting.pop()
            if not isinstance(item, _FOLLOWED) or id(item) in seen:
                continue
            seen[id(item)] = item
            if isinstance(item, nn.Module):
                self._modes.append((item, item.training))
                waiting.append(vars(item))
                # Scripted modules keep these outside of their `__dict__`.
                waiting.extend(item.children())
                waiting.extend(item.parameters(recurse=False))
                waiting.extend(item.buffers(recurse=False))
            elif isinstance(item, nn.Parameter):
                self._parameters.append(
                    (item, item.data, item.grad, item.requires_grad)
                )
            elif isinstance(item, Tensor):
                if _copyable(item):
                    self._values.append((item, item.data, item.detach().clone()))
            elif isinstance(item, dict):
                self._contents.append((item, list(item.items())))
                waiting.extend(item.values())
            else:
                if not isinstance(item, tuple):
                    self._contents.append((item, list(item)))
                waiting.extend(item)

    def set_gradients_aside(self) -> None:
        for parameter, *_ in self._parameters:
            parameter.grad = None

    def restore(self) -> None:
        for container, contents in self._contents:
            _refill(container, contents)
        for module, training in self._modes:
            if module.training is not training:
                module.training = training
        for tensor, storage, values in self._values:
            _reattach(tensor, storage)
            storage.copy_(values)
        for parameter, storage, grad, requires_grad in self._parameters:
            _reattach(parameter, storage)
            parameter.requires_grad_(requires_grad)
            if parameter.grad is not grad:
                parameter.grad = grad


_FOLLOWED = (nn.Module, Tensor, dict, list, set, deque, tuple)


def _copyable(tensor: Tensor) -> bool:
    """Whether a forward pass could write into this tensor, and we could undo it.

    Inference tensors can't be written outside of inference mode; expanded ones share
    memory between elements and refuse every write.
    """
    if tensor.is_inference() or tensor.layout != torch.strided or tensor.is_nested:
        return False
    return all(
        stride != 0 or size <= 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _reattach(tensor: Tensor, storage: Tensor) -> None:
    """Undo an assignment to `tensor.data`, as `module.double()` makes."""
    if storage.layout != torch.strided:
        return
    same = (
        tensor.dtype == storage.dtype
        and tensor.device == storage.device
        and tensor.shape == storage.shape
        and tensor.stride() == storage.stride()
        and tensor.data_ptr() == storage.data_ptr()
    )
    if not same:
        tensor.data = storage


def _refill(container: Any, contents: list[Any]) -> None:
    """Put the contents back; a container that still holds them is not written to."""
    if isinstance(container, dict):
        now = list(container.items())
        same = len(now) == len(contents) and all(
            key is old_key and value is old_value
            for (key, value), (old_key, old_value) in zip(now, contents, strict=True)
        )
        if not same:
            container.clear()
            container.update(contents)
        return
    items = list(container)
    if len(items) == len(contents) and all(map(_is, items, contents)):
        return
    container.clear()
    if isinstance(container, set):
        container.update(contents)
    else:
        container.extend(contents)


def _is(a: Any, b: Any) -> bool:
    return a is b
