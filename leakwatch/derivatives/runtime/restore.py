"""What a module holds, remembered and put back: nothing that was done to it is left."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor, nn

__all__ = ["Snapshot"]

_CONTAINERS = (dict, list, set, deque, tuple)
# Most of what a module holds: not worth a look.
_PLAIN = frozenset((bool, int, float, str, type(None)))


@final
class Snapshot:
    """What a module and everything that it reaches through containers holds.

    Of each submodule its mode, parameters, buffers, submodules, hooks and plain
    attributes, and the contents of the lists, dicts, sets and deques among them, nested
    ones included. Objects are remembered by identity; what is inside of other ones
    (arrays, helper classes) is not seen.

    Args:
        root: the module, or a container of whatever is to be remembered; submodules in
            plain lists count as well.
        tensors: also remember, by a copy, the numbers of each buffer and of each tensor
            in an attribute, and of each parameter, without a copy, its storage,
            gradient and ``requires_grad``. Not inside transforms of torch.func.
        expand: called once for everything else that is reached, tensors included if
            ``tensors`` is false; what it gives is remembered too.

    Example:
        >>> net = nn.BatchNorm1d(1, momentum=1.0)
        >>> before = Snapshot(net)
        >>> _ = net(torch.tensor([[1.0], [3.0]]))
        >>> float(net.running_mean), before.holds()
        (2.0, False)
        >>> before.restore()
        >>> float(net.running_mean)
        0.0
    """

    def __init__(
        self,
        root: Any,
        *,
        tensors: bool = True,
        expand: Callable[[Any], Iterable[Any]] | None = None,
    ) -> None:
        self._modes: list[tuple[nn.Module, bool]] = []
        self._empty: list[Any] = []
        self._contents: list[tuple[Any, list[Any]]] = []
        self._numbers: list[tuple[Tensor, Tensor, Tensor, int]] = []
        self._parameters: list[tuple[nn.Parameter, Tensor, Tensor | None, bool]] = []
        seen: dict[int, Any] = {}  # held, so that no identity is used again
        waiting: list[Any] = [root]
        while waiting:
            item = waiting.pop()
            if type(item) in _PLAIN or id(item) in seen:
                continue
            if isinstance(item, _CONTAINERS):
                if not item:  # most are: registries of hooks
                    self._empty.append(item)
                    continue
                seen[id(item)] = item
                if isinstance(item, dict):
                    values = list(item.values())
                    self._contents.append((item, [*item, *values]))
                    waiting += values
                    continue
                if not isinstance(item, tuple):
                    self._contents.append((item, list(item)))
                waiting += item
            elif isinstance(item, nn.Module):
                seen[id(item)] = item
                self._modes.append((item, item.training))
                waiting.append(vars(item))
                if isinstance(item, torch.jit.ScriptModule):
                    # These keep all that outside of their `__dict__`.
                    waiting.extend(item.children())
                    waiting.extend(item.parameters(recurse=False))
                    waiting.extend(item.buffers(recurse=False))
            elif tensors and isinstance(item, Tensor):
                seen[id(item)] = item
                self._remember(item)
            elif expand is not None:
                seen[id(item)] = item
                waiting += expand(item)

    def _remember(self, tensor: Tensor) -> None:
        if isinstance(tensor, nn.Parameter):
            state = tensor, tensor.data, tensor.grad, tensor.requires_grad
            self._parameters.append(state)
        elif _copyable(tensor):
            numbers = tensor.detach().clone()
            self._numbers.append((tensor, tensor.data, numbers, tensor._version))

    def set_gradients_aside(self) -> None:
        """Leaves each parameter without a gradient; :meth:`restore` puts it back."""
        for parameter, *_ in self._parameters:
            parameter.grad = None

    def holds(self) -> bool:
        """Whether nothing was written since: no attribute, container or tensor.

        A number that has taken the place of an equal one counts as the same.
        """
        return (
            not any(self._empty)
            and all(tensor._version == at for tensor, *_, at in self._numbers)
            and all(
                len(now) == len(then) and all(map(_same, now, then))
                for now, then in ((_items(c), then) for c, then in self._contents)
            )
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back; a container that has not changed is not written to."""
        for container in self._empty:
            if container:
                container.clear()
        for container, contents in self._contents:
            now = _items(container)
            if len(now) == len(contents) and all(map(operator.is_, now, contents)):
                continue
            container.clear()
            if isinstance(container, dict):
                half = len(contents) // 2
                container.update(zip(contents[:half], contents[half:], strict=True))
            elif isinstance(container, set):
                container.update(contents)
            else:
                container.extend(contents)
        for module, training in self._modes:
            if module.training is not training:
                module.training = training
        for tensor, storage, numbers, _ in self._numbers:
            _reattach(tensor, storage)
            storage.copy_(numbers)
        for parameter, storage, grad, requires_grad in self._parameters:
            _reattach(parameter, storage)
            # Parameters made in inference mode refuse to be told even what they are.
            if parameter.requires_grad is not requires_grad:
                parameter.requires_grad_(requires_grad)
            if parameter.grad is not grad:
                parameter.grad = grad


def _items(container: Any) -> list[Any]:
    """What is in a container; of a dictionary first all keys, then all values."""
    if isinstance(container, dict):
        return [*container, *container.values()]
    return list(container)


def _same(now: Any, then: Any) -> bool:
    if now is then:
        return True
    return isinstance(now, int | str) and type(now) is type(then) and now == then


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
    """Undoes an assignment to ``tensor.data``, as ``module.double()`` makes."""
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
