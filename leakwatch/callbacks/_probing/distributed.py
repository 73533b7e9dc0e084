"""What a callback must know about the other processes of a run."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer

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
