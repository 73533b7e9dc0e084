"""Criterion and network as one function of weights, input and label."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from leakwatch.derivatives.runtime.restore import Snapshot
from leakwatch.derivatives.runtime.weight_caches import Caches

__all__ = ["Criterion", "PlainTensors", "Prepare", "SampleLoss", "Weights"]

Criterion: TypeAlias = Callable[[nn.Module, Tensor, Tensor], Tensor]
Prepare: TypeAlias = Callable[[Tensor], Tensor]
_Own: TypeAlias = dict[tuple[int, str], tuple[dict[str, Any], Tensor]]


@dataclass(frozen=True)
class Weights:
    """What one evaluation holds constant: shared parameters by name, and the rest."""

    shared: dict[str, Tensor]
    fixed: dict[str, Tensor]

    @property
    def size(self) -> int:
        """Number of shared entries."""
        return sum(p.numel() for p in self.shared.values())


class PlainTensors:
    """Lets a forward write into copies of tensors that are not buffers.

    Attributes:
        written: names of those that a forward writes into, once known; ``None``
            before, when each of them may be.
        addresses: which of them a storage stands for in the current forward, or
            ``None`` while nobody asks.
    """

    def __init__(self) -> None:
        self.written: frozenset[str] | None = None
        self.addresses: dict[int, str] | None = None

    def copy(self, module: nn.Module) -> None:
        """Puts copies in place of the tensors that may be written into."""
        if self.written == frozenset():
            return
        for where, m in module.named_modules():
            for key, value in list(vars(m).items()):
                name = f"{where}.{key}"
                writable = self.written is None or name in self.written
                if type(value) is Tensor and writable:
                    copy = vars(m)[key] = value.detach().clone()
                    # Under a transform a tensor has no storage to speak of.
                    if self.addresses is not None and copy.layout == torch.strided:
                        self.addresses[copy.untyped_storage().data_ptr()] = name


class SampleLoss(nn.Module):
    """Criterion and module as one module, so that their parameters can be replaced.

    Args:
        module: the network.
        criterion: one loss per sample. When it is itself a module, its parameters are
            trained and shared like those of the network.
        prepare: what becomes of a batch of inputs before the criterion gets it, a
            differentiable function; ``None``: nothing.

    Attributes:
        tensors: those of the module that are neither parameters nor buffers.
        caches: what a forward would keep for the next; evaluations find them empty.
        only: names of the parameters that may be shared; ``None`` for all.
    """

    def __init__(
        self, module: nn.Module, criterion: Criterion, prepare: Prepare | None = None
    ) -> None:
        super().__init__()
        self.module = module
        self.criterion = criterion
        # Not a submodule: what prepares a batch shares no parameters.
        vars(self)["prepare"] = prepare
        # Registry and name → what was there before an evaluation put something else.
        self._held: _Own | None = None
        self.tensors = PlainTensors()
        self.caches = Caches()
        self.only: frozenset[str] | None = None

    def shares(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether the gradient of a parameter is shared: trained, and not left out."""
        return parameter.requires_grad and (self.only is None or name in self.only)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The losses of a batch; whatever it does to plain attributes is undone."""
        before = Snapshot(self, tensors=False)
        self.caches.empty()
        self.tensors.copy(self.module)
        try:
            loss: object = self.losses(x, y)
        finally:
            self.caches.look()
            before.restore()
        if not isinstance(loss, Tensor) or loss.shape != y.shape[:1]:
            returned = (
                f"shape {tuple(loss.shape)}"
                if isinstance(loss, Tensor)
                else f"a {type(loss).__name__}"
            )
            raise ValueError(
                f"criterion(module, x, y) must return one loss per sample, shape "
                f"({len(y)},), but returned {returned}; use reduction='none'."
            )
        return loss

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """What the criterion returns; nothing is checked or undone."""
        prepare: Prepare | None = vars(self)["prepare"]
        return self.criterion(self.module, prepare(x) if prepare else x, y)

    def sample(
        self,
        shared: dict[str, Tensor],
        fixed: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
        weight: Tensor | None = None,
    ) -> Tensor:
        """The loss of one sample, alone in its batch, as a function of everything.

        Input and buffers are copied: a forward may write into them, and what it wrote
        for one sample must not reach the next.
        """
        buffers = {name for name, _ in self.named_buffers()}
        fixed = {k: t.clone() if k in buffers else t for k, t in fixed.items()}
        loss = self.batch(shared | fixed, x[None].clone(), y[None].clone())
        return loss[0] if weight is None else loss[0] * weight

    def batch(self, tensors: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """The losses of a batch with ``tensors`` in place of the module's own, by name.

        Not by ``torch.func.functional_call``: in Torch 2.14 that leaves the replaced
        tensors behind in a submodule that is registered under two names.
        """
        names = {
            id(t): name for name, t in (*self.named_buffers(), *self.named_parameters())
        }
        own = {
            (id(registry), key): (registry, t)
            for registry in _registries(self)
            for key, t in registry.items()
            if t is not None and names[id(t)] in tensors
        }
        for (_, key), (registry, t) in own.items():
            registry[key] = tensors[names[id(t)]]
        try:
            loss: Tensor = self(x, y)
            return loss
        finally:
            if self._held is None:
                _put_back(own)
            else:
                self._held = own | self._held

    def is_quiet(self, tensors: dict[str, Tensor], x: Tensor, y: Tensor) -> bool:
        """Whether a forward leaves its module as it was, seen by running one.

        Args:
            tensors: all weights, by name.
            x: network inputs.
            y: labels.

        Returns:
            ``True`` if the criterion may be called again and again without putting
            anything back in between.
        """
        criterion = self.criterion
        if isinstance(criterion, nn.Module):
            return False
        quiet: list[bool] = []

        def watched(module: nn.Module, xs: Tensor, ys: Tensor) -> Tensor:
            before = Snapshot(module)
            loss = criterion(module, xs, ys)
            quiet.append(before.holds())
            return loss

        self.criterion = watched
        try:
            self.batch(tensors, x, y)
        finally:
            self.criterion = criterion
        return quiet == [True]

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, replaced tensors stay until the next evaluation.

        Checkpointed parts of a forward run again during the backward pass.
        """
        outer, self._held = self._held, {}
        try:
            yield
        finally:
            _put_back(self._held)
            self._held = outer


def _registries(root: nn.Module) -> Iterator[dict[str, Any]]:
    for m in root.modules():
        yield m._parameters
        yield m._buffers


def _put_back(own: _Own) -> None:
    for (_, key), (registry, t) in own.items():
        registry[key] = t
