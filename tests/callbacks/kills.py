"""Trainings that are killed by SIGKILL at chosen moments, and go on.

Run as a program: ``python kills.py FOLDER KILLS SEED`` prints what became of them as
JSON, on its last line. Every training is a process of its own, forked from this one so
that torch is imported once. It counts events: training steps, beginning and end of each
probe, of each write to the disk (checkpoints and report included), and the middle of a
checkpoint. A kill comes at an event drawn at random, all equally likely.
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from monitor_cases import Tiny, dataset, record_of
from torch.utils.data import DataLoader, TensorDataset

from leakwatch.callbacks import InversionAudit, LeakageMonitor
from leakwatch.callbacks._probing.run import ProbeRun
from leakwatch.callbacks._recording import recorder
from leakwatch.reporting import RiskLedger
from leakwatch.reporting.ledger import storage

EPOCHS = 3
_OPTIONS: dict[str, Any] = {"verbose": False, "seed": 1}


class Events:
    """Counts, and kills this process at one of them."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.names: list[str] = []

    def happens(self, name: str, last_words: Callable[[], None] | None = None) -> None:
        self.names.append(name)
        if len(self.names) == self.at:
            if last_words is not None:
                last_words()
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, function: str, name: str) -> None:
        right = getattr(owner, function)

        def counted(*args: Any, **keywords: Any) -> Any:
            self.happens(f"before {name}")
            out = right(*args, **keywords)
            self.happens(f"after {name}")
            return out

        setattr(owner, function, counted)


class Saving(TorchCheckpointIO):
    """Writes checkpoints, and half of one where a kill comes between."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events

    def save_checkpoint(self, checkpoint: Any, path: Any, **options: Any) -> None:
        def torn() -> None:
            stream = io.BytesIO()
            torch.save(checkpoint, stream)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(stream.getvalue()[: stream.tell() // 2])

        self._events.happens("inside checkpoint", torn)
        super().save_checkpoint(checkpoint, path, **options)
        self._events.happens("after checkpoint")


class Stepping(Tiny):
    events: Events

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.events.happens("training step")
        return super().training_step(batch, batch_idx)


def train(folder: Path, at: int | None) -> None:
    """Go on from the last whole checkpoint, or from the start."""
    events = Events(at)
    events.around(storage.os, "replace", "a file takes its name")
    events.around(ProbeRun, "measure", "a probe")
    events.around(recorder, "write_report", "the report")
    L.seed_everything(0, verbose=False)
    module = Stepping()
    module.events = events
    x, y = dataset().tensors
    same = TensorDataset(x[:4].repeat(4, 1, 1, 1), y[:4].repeat(4))
    watched = LeakageMonitor(2, directory=str(folder / "leakwatch"), **_OPTIONS)
    audit = InversionAudit(
        2,
        attack="lavp-l2",
        worst_case=None,
        steps=2,
        restarts=1,
        scores=["norms"],
        directory=str(folder / "audit"),
        report=False,
        **_OPTIONS,
    )
    saved = ModelCheckpoint(
        folder / "saved", filename="{step}", save_top_k=-1, every_n_train_steps=3
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        logger=False,
        plugins=[Saving(events)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[watched, audit, saved],
    )
    trainer.fit(module, DataLoader(same, batch_size=4), ckpt_path=newest(folder))
    weights = torch.nn.utils.parameters_to_vector(module.parameters()).tolist()
    outcome = {
        "events": events.names,
        "weights": weights,
        "records": [record_of(watched), record_of(audit)],
        "directories": [watched.run_directory, audit.run_directory],
    }
    (folder / f"outcome-{os.getpid()}.json").write_text(json.dumps(outcome))


def newest(folder: Path) -> str | None:
    found = sorted(folder.glob("saved/*.ckpt"), key=lambda p: int(p.stem[5:]))
    for path in reversed(found):
        try:
            torch.load(path, weights_only=True)
        except Exception:  # the one that was being written
            continue
        return str(path)
    return None


def start(folder: Path, at: int | None = None) -> int:
    """A process that trains; its number."""
    process = os.fork()
    if process == 0:
        try:
            train(folder, at)
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    return process


def end(process: int) -> int:
    """How it ended: 0, 1, or minus the number of a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def outcome(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("outcome-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def faults(folder: Path, expected: dict[str, Any], fresh: int = 1) -> list[str]:
    """What is not as in an uninterrupted training.

    Args:
        folder: of the training.
        expected: outcome of the uninterrupted one.
        fresh: how often it began without a checkpoint: each is a run of its own, and
            leaves the folder of the one before alone.
    """
    found, wrong = outcome(folder), []
    if found["weights"] != expected["weights"]:
        wrong.append("weights")
    if found["records"] != expected["records"]:
        wrong.append("records")
    for name, directory in zip(
        ("leakwatch", "audit"), found["directories"], strict=True
    ):
        folders = list(folder.glob(f"{name}*"))
        if len(folders) > fresh or (fresh == 1 and Path(directory).name != name):
            wrong.append(f"{fresh} starts, folders {folders}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ledger = RiskLedger.open(directory)
            arrays = [*ledger.rows(), *ledger.spectra(), *ledger.attacks()]
        if ledger.problems or not arrays:
            wrong.append(f"{name}: {ledger.problems}")
    if not (Path(found["directories"][0]) / "report.html").is_file():
        wrong.append("no report")
    return wrong


def main(root: Path, kills: int, seed: int) -> dict[str, Any]:
    whole = root / "whole"
    whole.mkdir(parents=True)
    assert end(start(whole)) == 0
    expected = outcome(whole)
    assert not faults(whole, expected)
    draw, done = random.Random(seed), []
    for number in range(kills):
        folder = root / str(number)
        folder.mkdir()
        killed: list[str] = []
        fresh = 0
        # Up to three kills of one training: a resumed one is killed as well.
        for _ in range(draw.choice((1, 1, 2, 3))):
            fresh += newest(folder) is None
            at = 1 + draw.randrange(len(expected["events"]))
            if end(start(folder, at)) == 0:
                break
            killed.append(expected["events"][at - 1])
        ended = 0
        if not list(folder.glob("outcome-*")):
            fresh += newest(folder) is None
            ended = end(start(folder))
        wrong = (
            faults(folder, expected, fresh) if ended == 0 else [f"exit status {ended}"]
        )
        done.append({"killed": killed, "wrong": wrong})
    return {"events": expected["events"], "kills": done}


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # forks, and Lightning about tiny runs
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
