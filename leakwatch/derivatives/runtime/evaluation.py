"""The conditions of an evaluation, and how everything is undone after it."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from leakwatch.derivatives.runtime.modules import underlying
from leakwatch.derivatives.runtime.restore import Snapshot
from leakwatch.derivatives.runtime.rng_and_precision import (
    isolated_rng,
    plain_arithmetic,
)
from leakwatch.derivatives.runtime.sample_loss import SampleLoss, Weights
from leakwatch.derivatives.safe_ops.substitutes import Substitutes

__all__ = ["as_evaluated", "evaluating", "watches"]

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
# One thread at a time: random streams, flags of arithmetic and torch's levels of
# forward mode belong to the process.
_ALONE = threading.RLock()
_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


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
            ``safe_ops.substitutes.Substitutes``, which makes every single
            operation slower; ``False`` when forwards and backwards see to it.

    Yields:
        Copies of the weights at this moment, in ``dtype``; buffers that need no cast
        are the module's own.
    """
    with (
        _ALONE,
        warnings.catch_warnings(),
        isolated_rng(),
        plain_arithmetic(device_type),
        _eager(),
        as_evaluated(loss, dtype),
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
        with Substitutes() if substitutes else nullcontext():
            yield Weights(shared, fixed)


@contextmanager
def as_evaluated(root: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Inference mode of the network, eager; everything is put back afterwards.

    Args:
        root: the module.
        dtype: also cast plain tensor attributes to this.
    """
    with _ALONE:
        yield from _as_evaluated(root, dtype)


def _as_evaluated(root: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    # The numbers too: who calls the module itself may have its forward write into it.
    before = Snapshot(root, tensors=dtype is not None)
    try:
        for parent in list(root.modules()):
            for name, child in list(parent._modules.items()):
                if child is not None and underlying(child) is not child:
                    parent._modules[name] = underlying(child)
        for m in root.modules():
            for registry in (getattr(m, kind) for kind in _HOOKS):
                for key, hook in list(registry.items()):
                    if watches(hook):
                        del registry[key]
            m.__dict__["training"] = False
            if "_compiled_call_impl" in m.__dict__:  # set by Module.compile()
                m.__dict__["_compiled_call_impl"] = None
            for name, value in list(vars(m).items()):
                if dtype and type(value) is Tensor:
                    m.__dict__[name] = _cast(value.detach(), dtype)
        yield
    finally:
        before.restore()


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
    """Whether a hook of a tracker or of Opacus keeps what it sees: not what we do."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__module__", None) or type(hook).__module__
    return str(owner).split(".")[0] in ("wandb", "opacus")


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    if t.is_floating_point():
        t = t.to(dtype)
    elif t.is_complex():
        t = t.to(_COMPLEX[dtype])
    # Made in inference mode, a tensor can't be saved for a backward pass.
    return t.clone() if t.is_inference() else t
