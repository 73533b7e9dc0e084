"""What a callback must know about the other processes of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

_SHARDED = {
    "FSDPStrategy": "FSDP",
    "DeepSpeedStrategy": "DeepSpeed",
    "ModelParallelStrategy": "model parallel",
    "XLAFSDPStrategy": "XLA FSDP",
}


def refuse_sharded(trainer: Trainer, callback: str) -> None:
    """Raises where no process holds the whole network.

    Args:
        trainer: the trainer, with its strategy chosen.
        callback: name for the message.

    Raises:
        RuntimeError: for FSDP, DeepSpeed and other strategies that shard parameters.
    """
    for kind in type(trainer.strategy).__mro__:
        if kind.__name__ in _SHARDED:
            raise RuntimeError(
                f"{callback} can't run under strategy={_SHARDED[kind.__name__]}: "
                f"parameters are sharded over processes and per-sample derivatives "
                f"need the whole network on each; train with strategy='ddp', or score "
                f"a checkpoint afterwards with `leakwatch audit`."
            )


@contextmanager
def refusing_collectives(module: nn.Module) -> Iterator[None]:
    """Raises after a body that evaluates a module if processes talked meanwhile.

    Each process evaluates the module for probes of its own, so not equally often: one
    that waits for another in its forward would wait for ever.

    Args:
        module: the network; the body is the same in every process.

    Raises:
        RuntimeError: for a collective operation, where there are several processes.
    """
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not several or torch.distributed.get_world_size() == 1:
        yield
        return
    with _Listening() as heard:
        yield
    if heard.operations:
        raise RuntimeError(
            f"the forward of {type(module).__name__} exchanges data between processes "
            f"({', '.join(sorted(heard.operations))}), but each process evaluates it "
            f"for probes of its own, not equally often, and would wait for ever; let "
            f"it do so only while self.training, or score a checkpoint in one process "
            f"with `leakwatch audit`."
        )


class _Listening(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the collective operations that a body calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "c10d" in func.namespace:
            self.operations.add(func.overloadpacket.__name__.strip("_"))
        return func(*args, **(kwargs or {}))


def refuse_device(trainer: Trainer, callback: str) -> None:
    """Raises where the network will lie on a device without float64.

    Args:
        trainer: the trainer, with its strategy chosen.
        callback: name for the message.

    Raises:
        RuntimeError: for any device but a CPU or a CUDA device.
    """
    kind = trainer.strategy.root_device.type
    if kind not in ("cpu", "cuda"):
        raise RuntimeError(
            f"{callback} works on CPU and CUDA devices, but the trainer has chosen "
            f"{kind!r}, which lacks the float64 arithmetic that it needs; train with "
            f"Trainer(accelerator='cpu'), or score a checkpoint afterwards with "
            f"`leakwatch audit`."
        )


def gather(trainer: Trainer, mine: Any) -> list[Any]:
    """What every process holds, in order of rank; every process must call this.

    Args:
        trainer: the trainer.
        mine: something that can be pickled, without tensors on a device.

    Returns:
        One entry per process; ``[mine]`` in a single one.
    """
    if trainer.world_size == 1 or not torch.distributed.is_initialized():
        return [mine]
    everything: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(everything, mine)
    return everything
