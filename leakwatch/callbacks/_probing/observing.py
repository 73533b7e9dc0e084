"""The observer leaves no trace: a module is given back exactly as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain

from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parameter import is_lazy

from leakwatch.derivatives.runtime.own_streams import own_streams_kept
from leakwatch.derivatives.runtime.restore import Snapshot
from leakwatch.derivatives.runtime.rng_and_precision import (
    isolated_rng,
    plain_arithmetic,
)

__all__ = ["observing"]


@contextmanager
def observing(module: nn.Module, *also: object, plainly: bool = True) -> Iterator[None]:
    """Let the body use `module` freely and undo everything that it does to it.

    Restored, also after an exception:

    - every global random stream (`rng_and_precision.isolated_rng`), and those that
      the module holds (`own_streams.OwnStreams`);
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
    neither module, container, tensor nor random generator (an array, a helper class, a
    global), is not undone.

    Args:
        module: any module; submodules held in plain lists count as well.
        also: other objects that the body uses, whose random streams are restored.
        plainly: whether arithmetic settings are set inside; ``False`` leaves those of
            training.

    Raises:
        TypeError: `module` is not an `nn.Module`.
        ValueError: a parameter or buffer has no shape yet (lazy modules).

    Example:
        >>> import torch
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
    arithmetic = plain_arithmetic(device_type) if plainly else nullcontext()
    with isolated_rng(), own_streams_kept(module, *also), arithmetic:
        before = Snapshot(module)
        try:
            before.set_gradients_aside()
            _mute(module)
            yield
        finally:
            before.restore()


def _mute(module: nn.Module) -> None:
    """Keep a forward that calls ``self.log`` from changing the metrics of training.

    Set on the instance, so that the snapshot takes it away again.
    """
    for part in module.modules():
        if isinstance(part, LightningModule):
            vars(part).update(log=_ignore, log_dict=_ignore)


def _ignore(*_: object, **__: object) -> None:
    """Stands in for ``log`` and ``log_dict``."""
