"""Sees what a forward pass does, operation by operation, below autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leakwatch.derivatives.runtime import SampleLoss, UnsupportedModuleError, Weights
from leakwatch.derivatives.runtime.modules import NotLayerwiseError, readable

__all__ = [
    "ForwardWatch",
    "RunningModules",
    "refuse_reads_outside_layers",
    "refuse_stray_reads",
    "watch_forward",
]

_LOOK = torch.ops.aten._local_scalar_dense


class RunningModules:
    """The submodules whose forward is running, innermost last."""

    def __init__(self, module: nn.Module) -> None:
        # By id: torchmetrics hashes by state.
        self.names = {
            id(m): f"{name or 'the module itself'} ({type(m).__name__})"
            for name, m in module.named_modules()
        }
        self.stack: list[int] = []

    @property
    def here(self) -> str:
        """The innermost one in words, empty outside of all."""
        return self.names[self.stack[-1]] if self.stack else ""

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Keeps track inside; an exception leaves the stack as it was then."""

        def enter(m: nn.Module, _: object) -> None:
            if id(m) in self.names:
                self.stack.append(id(m))

        def leave(m: nn.Module, _: object, __: object) -> None:
            while id(m) in self.stack and self.stack.pop() != id(m):
                pass

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@final
class ForwardWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of a forward, below autograd and all transforms.

    Args:
        loss: module and criterion.
        dtype: the arithmetic.
        placed: tensors that stand for weights, by name.

    Attributes:
        operations: name of each operation → the submodule that was first to use it.
        written: names of the tensors, neither parameters nor buffers, that were
            written into.
        read: names of the placed tensors, and of views of them, that were used.
        looks: whether a number was looked at (``.item()``, a condition).
        lower: lower precision → the submodule that was first to convert to it.

    Raises:
        UnsupportedModuleError: inside, if a parameter of the module itself is read, in
            whose place another tensor should have been found.
    """

    def __init__(
        self,
        loss: SampleLoss,
        dtype: torch.dtype,
        placed: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = type(loss.module).__name__
        self.modules = RunningModules(loss.module)
        self.dtype = dtype
        self.live: dict[int, list[str]] = {}
        for name, p in loss.named_parameters(remove_duplicate=False):
            if p.requires_grad:
                self.live.setdefault(id(p), []).append(name.removeprefix("module."))
        self._placed = {_address(t): n for n, t in (placed or {}).items() if t.numel()}
        self.plain = loss.tensors
        self.written: set[str] = set()
        self.read: set[str] = set()
        self.looks = False
        self.operations: dict[str, str] = {}
        self.lower: dict[torch.dtype, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.operations.setdefault(func.overloadpacket.__name__, self.modules.here)
        self.looks |= func.overloadpacket is _LOOK
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for t in operands:
            if id(t) in self.live:
                name, *others = self.live[id(t)]
                tied = f" (tied: {', '.join(others)})" if others else ""
                raise UnsupportedModuleError(
                    f"{self.name} reads its parameter {name!r}{tied} by a reference "
                    f"that is not registered (a plain list, a closure, the criterion), "
                    f"so its gradient would come out incomplete. Read it where it is "
                    f"registered, as in module.{name}."
                )
            if self._placed and _has_numbers(t) and _address(t) in self._placed:
                self.read.add(self._placed[_address(t)])
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        for argument in func._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for t in tree_leaves((named | kwargs).get(argument.name)):
                self._note_write(t)
        out = func(*args, **kwargs)
        if any(t.dtype == self.dtype for t in operands):
            for t in tree_leaves(out):
                if self._is_lower(t):
                    self.lower.setdefault(t.dtype, self.modules.here)
        return out

    def _is_lower(self, t: object) -> bool:
        return (
            isinstance(t, Tensor)
            and t.is_floating_point()
            and t.dtype.itemsize < self.dtype.itemsize
        )

    def _note_write(self, t: object) -> None:
        if isinstance(t, Tensor) and _has_numbers(t):
            name = (self.plain.addresses or {}).get(_address(t))
            if name is not None:
                self.written.add(name)

    @property
    def rounds(self) -> bool:
        """Whether part of the forward is computed in a lower precision."""
        return bool(self.lower)

    @property
    def notes(self) -> list[str]:
        """What a reader of results should know."""
        return [
            f"{where or self.name} converts to {dtype} inside its forward, so results "
            f"are only as accurate as that, not {self.dtype}"
            for dtype, where in self.lower.items()
        ]


def watch_forward(
    loss: SampleLoss, at: Weights, xs: Tensor, ys: Tensor
) -> ForwardWatch:
    """Runs the forward on each sample and tells what was seen.

    Args:
        loss: module and criterion, under evaluation.
        at: its weights.
        xs: inputs.
        ys: labels.

    Returns:
        The watch, with what it saw.

    Raises:
        UnsupportedModuleError: if a parameter is read where it is not registered.
    """
    watch = ForwardWatch(loss, xs.dtype)
    try:
        with torch.no_grad(), watch.modules.followed():
            for x, y in zip(xs, ys, strict=True):
                loss.tensors.addresses = {}
                with watch:
                    loss.sample(at.shared, at.fixed, x, y)
    finally:
        loss.tensors.addresses = None
    return watch


def refuse_stray_reads(loss: SampleLoss, at: Weights, x: Tensor, y: Tensor) -> None:
    """Refuses a network that reads parameters where nothing can take their place.

    To be called while the module's parameters are its own. Whatever else goes wrong in
    the forward is left to those who run it next.

    Args:
        loss: module and criterion, under evaluation.
        at: its weights.
        x: inputs, of which the first is used.
        y: their labels.

    Raises:
        UnsupportedModuleError: names the parameter.
    """
    try:
        watch_forward(loss, at, x[:1].detach(), y[:1])
    except UnsupportedModuleError:
        raise
    except Exception:
        return


def refuse_reads_outside_layers(
    loss: SampleLoss, at: Weights, run: Callable[[dict[str, Tensor]], object]
) -> None:
    """Refuses a network that does more than its layers, where nobody follows it.

    Weights that are used outside their layers, a penalty in the criterion or a norm
    without a gradient, may change values by less than a comparison sees, or only at
    other weights. A forward that looks at a number can take another way for other
    images, and then all images of a batch take it.

    Args:
        loss: module and criterion, under evaluation, with the layers replaced.
        at: its weights.
        run: evaluates some images with the given tensors in place of the shared
            parameters, by name.

    Raises:
        NotLayerwiseError: names the weights.
    """
    placed = {name: p.detach().clone() for name, p in at.shared.items()}
    watch = ForwardWatch(loss, torch.float64, placed)
    with watch:
        run({name: p.requires_grad_() for name, p in placed.items()})
    if watch.read:
        raise NotLayerwiseError(
            f"the loss uses {readable(watch.read)} outside their layers too"
        )
    if watch.looks:
        raise NotLayerwiseError(
            "the forward looks at numbers (.item(), or a tensor as a condition), so "
            "that images of one batch could not take different ways"
        )


def _has_numbers(t: Tensor) -> bool:
    return t.layout == torch.strided and t.numel() > 0


def _address(t: Tensor) -> int:
    # Of the storage: views and what was detached stand for the same numbers.
    return t.untyped_storage().data_ptr()
