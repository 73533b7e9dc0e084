"""Which modules can be evaluated, and what is inside of wrapped ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

__all__ = [
    "NotLayerwiseError",
    "UnsupportedModuleError",
    "check_module",
    "readable",
    "underlying",
]


class UnsupportedModuleError(RuntimeError):
    """A module whose gradient can't be differentiated in the input, and why."""


class NotLayerwiseError(RuntimeError):
    """Not all uses of a network's shared parameters are in layers that are known."""


def readable(names: Iterable[str]) -> str:
    """Names of parameters as the network's owner knows them, for a sentence."""
    return ", ".join(sorted(name.removeprefix("module.") for name in names))


# The base of what Opacus wraps networks in, to form gradients of single samples.
_OPACUS = "AbstractGradSampleModule"


def underlying(module: nn.Module) -> nn.Module:
    """The eager module inside a compiled or data-parallel one.

    Args:
        module: any module.

    Returns:
        ``module`` itself, or what ``torch.compile``, ``DataParallel``,
        ``DistributedDataParallel`` or Opacus wrapped.
    """
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        inner = getattr(module, "_orig_mod", None)
        if isinstance(module, parallel):
            inner = module.module
        if any(kind.__name__ == _OPACUS for kind in type(module).__mro__):
            inner = module._module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


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
    if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
        raise ValueError(
            f"{name} is on the device 'meta', where tensors have no numbers; load its "
            f"weights, as with module.to_empty(device='cpu').load_state_dict(...)."
        )
    for kind in {p.device.type for p in module.parameters()} - {"cpu", "cuda"}:
        raise UnsupportedModuleError(
            f"{name} is on the device {kind!r}; leakwatch needs the float64 arithmetic "
            f"of a CPU or a CUDA device. Move it, as with module.cpu()."
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
