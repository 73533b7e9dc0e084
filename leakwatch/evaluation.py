"""How a network is evaluated: as at inference, eager, in one precision, traceless.

A measurement needs the network in another state than training left it in. Everything
that is changed for it here is put back when the evaluation ends, also by an exception.
"""

from __future__ import annotations

import functools
import operator
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from leakwatch.caches import Caches
from leakwatch.isolation import isolated_rng, plain_arithmetic
from leakwatch.substitutes import Substitutes

__all__ = [
    "Criterion",
    "SampleLoss",
    "UnsupportedModuleError",
    "Weights",
    "check_module",
    "evaluating",
    "underlying",
    "watches",
]

Criterion: TypeAlias = Callable[[nn.Module, Tensor, Tensor], Tensor]

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
_ABSENT = object()


class UnsupportedModuleError(RuntimeError):
    """A module whose gradient can't be differentiated in the input, and why."""


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
                known = self.written is None or name in self.written
                if type(value) is Tensor and known:
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

    Attributes:
        tensors: those of the module that are neither parameters nor buffers.
        caches: what a forward would keep for the next; evaluations find them empty.
        only: names of the parameters that may be shared; ``None`` for all.
    """

    def __init__(self, module: nn.Module, criterion: Criterion) -> None:
        super().__init__()
        self.module = module
        self.criterion = criterion
        self._holds = False
        self.tensors = PlainTensors()
        self.caches = Caches()
        self.only: frozenset[str] | None = None

    def shares(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether the gradient of a parameter is shared: trained, and not left out."""
        return parameter.requires_grad and (self.only is None or name in self.only)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The losses of a batch; whatever it does to plain attributes is undone."""
        kept = _Attributes(self)
        self.caches.empty()
        self.tensors.copy(self.module)
        try:
            loss: object = self.criterion(self.module, x, y)
        finally:
            self.caches.look()
            kept.put_back()
        if not isinstance(loss, Tensor) or loss.shape != y.shape[:1]:
            given = (
                f"shape {tuple(loss.shape)}"
                if isinstance(loss, Tensor)
                else f"a {type(loss).__name__}"
            )
            raise ValueError(
                f"criterion(module, x, y) must return one loss per sample, shape "
                f"({len(y)},), but returned {given}; use reduction='none'."
            )
        return loss

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
        before = _members(self)
        names = {
            id(t): name for name, t in (*self.named_buffers(), *self.named_parameters())
        }
        try:
            for space, own in before:
                for key, t in own.items():
                    if t is not None and names[id(t)] in tensors:
                        space[key] = tensors[names[id(t)]]
            loss: Tensor = self(x, y)
            return loss
        finally:
            if not self._holds:
                _restore(before)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, replaced tensors stay until the next evaluation.

        Checkpointed parts of a forward run again during the backward pass.
        """
        before, held = _members(self), self._holds
        self._holds = True
        try:
            yield
        finally:
            self._holds = held
            _restore(before)


def underlying(module: nn.Module) -> nn.Module:
    """The eager module inside a compiled or data-parallel one.

    Args:
        module: any module.

    Returns:
        ``module`` itself, or what ``torch.compile``, ``DataParallel`` or
        ``DistributedDataParallel`` wrapped.
    """
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        inner = getattr(module, "_orig_mod", None)
        if isinstance(module, parallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


@contextmanager
def evaluating(
    loss: SampleLoss, device_type: str, dtype: torch.dtype, *, substitutes: bool = True
) -> Iterator[Weights]:
    """The conditions under which every evaluation runs; all undone afterwards.

    Args:
        loss: module and criterion.
        device_type: where the inputs are.
        dtype: arithmetic, float32 or float64.
        substitutes: whether all that happens inside is under
            :class:`leakwatch.substitutes.Substitutes`, which makes every single
            operation slower; ``False`` when forwards and backwards see to it.

    Yields:
        Copies of the weights at this moment, in ``dtype``.
    """
    with (
        warnings.catch_warnings(),
        isolated_rng(),
        plain_arithmetic(device_type),
        _eager(),
        as_evaluated(loss, dtype),
        Substitutes() if substitutes else nullcontext(),
    ):
        # Operations that vmap runs one by one say so, and so do compiled modules to
        # which we listen for a moment: neither is news to the user.
        warnings.filterwarnings("ignore", "There is a performance drop")
        warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when")
        if any(isinstance(m, nn.RNNBase) for m in loss.modules()):
            # cuDNN's recurrent layers have no second derivative; plain_arithmetic
            # switches it on again.
            torch.backends.cudnn.enabled = False
        shared: dict[str, Tensor] = {}
        fixed: dict[str, Tensor] = {}
        for name, p in loss.named_parameters():
            into = shared if loss.shares(name, p) else fixed
            into[name] = _cast(p.detach(), dtype).clone()
        for name, b in loss.named_buffers():
            fixed[name] = _cast(b.detach(), dtype)
        yield Weights(shared, fixed)


@contextmanager
def as_evaluated(root: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Inference mode of the network, eager; everything is put back afterwards.

    Args:
        root: the module.
        dtype: also cast plain tensor attributes to this.
    """
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    kept: list[_Attributes] = []
    hooks: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    members = _members(root)
    try:
        for parent in list(root.modules()):
            for name, child in list(parent._modules.items()):
                if child is not None and underlying(child) is not child:
                    swapped.append((parent, name, child))
                    parent._modules[name] = underlying(child)
        kept.append(_Attributes(root))
        for m in root.modules():
            for registry in (getattr(m, kind) for kind in _HOOKS):
                hooks.append((registry, dict(registry)))
                for key, hook in hooks[-1][1].items():
                    if watches(hook):
                        del registry[key]
            m.training = False
            if "_compiled_call_impl" in m.__dict__:  # set by Module.compile()
                m.__dict__["_compiled_call_impl"] = None
            for name, value in list(vars(m).items()):
                if dtype and type(value) is Tensor:
                    m.__dict__[name] = _cast(value.detach(), dtype)
        yield
    finally:
        for attributes in kept:
            attributes.put_back()
        _restore(members)
        _restore(hooks)
        for parent, name, child in reversed(swapped):
            parent._modules[name] = child


def check_module(module: nn.Module) -> None:
    """Raises unless the module has parameters whose gradients can be shared."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, got a {type(module).__name__}."
        )
    name = type(module).__name__
    for where, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise UnsupportedModuleError(
                f"{where or name} is a scripted or traced module, whose parameters "
                f"can't be replaced; pass the module that torch.jit was given."
            )
    if any(is_lazy(t) for t in (*module.parameters(), *module.buffers())):
        raise ValueError(
            f"{name} has parameters without a shape yet (lazy modules); run one "
            f"forward pass first."
        )
    trainable = [p for p in module.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError(
            f"{name} has no parameter with requires_grad=True, so it shares no "
            f"gradient; unfreeze what clients train."
        )
    if any(p.is_complex() for p in trainable):
        raise ValueError(
            f"{name} has complex parameters, which are not supported; store real and "
            f"imaginary parts as two real parameters."
        )


def _eager() -> AbstractContextManager[object]:
    """Functions decorated with torch.compile run as they were written."""
    # Without Dynamo nothing is compiled, and importing it takes seconds. Torch 2.5
    # has no such switch.
    stance = getattr(torch.compiler, "set_stance", None)
    if stance is None or "torch._dynamo" not in sys.modules:
        return nullcontext()
    eager: AbstractContextManager[object] = stance("force_eager")
    return eager


def watches(hook: Any) -> bool:
    """Whether an experiment tracker's hook logs what it sees: not our evaluations."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__module__", None) or type(hook).__module__
    return str(owner).split(".")[0] == "wandb"


def _members(root: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    spaces = [s for m in root.modules() for s in (m._parameters, m._buffers)]
    return [(space, dict(space)) for space in spaces]


def _restore(before: list[tuple[dict[Any, Any], dict[Any, Any]]]) -> None:
    """Gives registries their entries and order back, as the same dictionaries."""
    for space, own in before:
        same = list(space) == list(own) and all(space[k] is own[k] for k in own)
        if not same:
            space.clear()
            space.update(own)


class _Attributes:
    """Plain attributes of all submodules, and what the containers among them hold."""

    def __init__(self, root: nn.Module) -> None:
        self._spaces = [(vars(m), dict(vars(m))) for m in root.modules()]
        self._containers = [
            (value, type(value)(value))
            for _, before in self._spaces
            for value in before.values()
            if type(value) in (list, dict, set, deque)
        ]

    def put_back(self) -> None:
        for space, before in self._spaces:
            for name in space.keys() - before.keys():
                del space[name]
            for name, value in before.items():
                if space.get(name, _ABSENT) is not value:
                    space[name] = value
        for container, contents in self._containers:
            now, then = _flat(container), _flat(contents)
            if len(now) != len(then) or any(map(operator.is_not, now, then)):
                container.clear()
                fill = container.extend if hasattr(container, "extend") else None
                (fill or container.update)(contents)


def _flat(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container)


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    if t.is_floating_point():
        t = t.to(dtype)
    elif t.is_complex():
        t = t.to(_COMPLEX[dtype])
    # Made in inference mode, a tensor can't be saved for a backward pass.
    return t.clone() if t.is_inference() else t
