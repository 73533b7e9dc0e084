"""A training whose W&B process is killed; run by a test in a process of its own.

Arguments: a folder, and whether the module logs anything itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger
from monitor_cases import Tiny, fit, flat, moments_of, monitor
from torch import Tensor
from torch.nn import functional as F


class Quiet(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class Kills(Callback):
    """Before the third epoch, whatever process W&B has started."""

    def __init__(self) -> None:
        self.killed = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 2:
            for pid in children():
                os.kill(pid, signal.SIGKILL)
                self.killed += 1
            time.sleep(0.5)


def children() -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            command = (process / "cmdline").read_text()
        except OSError:  # it has ended
            continue
        if int(parent) == os.getpid() and "wandb" in command:
            found.append(int(process.name))
    return found


def main(folder: Path, logs: bool) -> None:
    watched, kills = monitor(every_n_epochs=1, scores=["norms"]), Kills()
    module = Tiny() if logs else Quiet()
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            logger = WandbLogger(offline=True, save_dir=str(folder), project="x")
            fit(folder, watched, kills, module=module, logger=logger, max_epochs=4)
        except Exception as raised:
            error = type(raised).__name__
    found = {
        "killed": kills.killed,
        "error": error,
        "said": [str(w.message) for w in caught if "leakwatch" in str(w.message)],
        "moments": moments_of(watched),
        "weights": flat(list(module.parameters())),
    }
    (folder / "found.json").write_text(json.dumps(found))
    os._exit(0)  # W&B would wait for its process


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "logs")
