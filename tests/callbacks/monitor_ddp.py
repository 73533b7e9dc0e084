"""Monitored trainings whose record and weights no number of processes changes."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from monitor_cases import CLASSES, Tiny, dataset, fit, record_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

import leakwatch
from leakwatch.callbacks import LeakageMonitor
from leakwatch.scores import Scoring

KEY = "leakwatch-detail/i2f_lb/median"


class Double(Tiny):
    """In double precision: the sum over processes rounds where no test can see it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x.double()), y)
        self.log("train/loss", loss, on_epoch=True, sync_dist=True)
        return loss


def watch(**changes: Any) -> LeakageMonitor:
    arguments: dict[str, Any] = {"report": False, "verbose": False, "probes": 3}
    return LeakageMonitor(**(arguments | changes))


def go(folder: Path, *callbacks: Any, processes: int = 1, **changes: Any) -> L.Trainer:
    """The same training whatever the number of processes."""
    data = dataset(12)
    rank = int(os.environ.get("RANK", "0")) if processes > 1 else 0
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, processes, rank, shuffle=False
    )
    arguments: dict[str, Any] = {
        "module": Double,
        "data": DataLoader(data, 4 // processes, sampler=sampler),
        "use_distributed_sampler": False,
        "max_epochs": 2,
        "precision": "64-true",
    }
    if processes > 1:
        arguments |= {"strategy": "ddp", "devices": processes}
    return fit(folder, *callbacks, **(arguments | changes))


def weights(run: L.Trainer) -> list[list[float]]:
    assert run.model is not None
    return [p.detach().flatten().tolist() for p in run.model.parameters()]


def plain(folder: Path, processes: int) -> dict[str, Any]:
    return {"weights": weights(go(folder, processes=processes))}


def double(folder: Path, processes: int) -> dict[str, Any]:
    watched = watch(dtype="float64", log="all")
    run = go(folder, watched, processes=processes)
    metrics = {
        k: float(v)
        for k, v in run.callback_metrics.items()
        if k.startswith("leakwatch") and "seconds" not in k and "time" not in k
    }
    return {
        "weights": weights(run),
        "record": record_of(watched),
        "directory": watched.run_directory,
        "metrics": metrics,
        "fraction": float(run.callback_metrics["leakwatch/time_fraction"]),
    }


def single(folder: Path, processes: int) -> dict[str, Any]:
    watched = watch()
    go(folder, watched, processes=processes, max_epochs=1)
    return {"record": [r for r in record_of(watched) if r[0] == 0]}


def one_probe(folder: Path, processes: int) -> dict[str, Any]:
    watched = watch(dtype="float64", probes=1)
    go(folder, watched, processes=processes)
    return {"record": record_of(watched)}


def resumed(folder: Path, processes: int) -> dict[str, Any]:
    save = ModelCheckpoint(folder / "c", monitor=KEY, mode="max", save_last=True)
    go(
        folder, watch(dtype="float64"), save, processes=processes, max_epochs=1,
        enable_checkpointing=True,
    )  # fmt: skip
    watched = watch(dtype="float64")
    stop = EarlyStopping(KEY, mode="max", patience=5)
    go(
        folder, watched, stop, processes=processes,
        ckpt_path=folder / "c" / "last.ckpt",
    )  # fmt: skip
    return {"record": record_of(watched), "best": float(save.best_model_score)}


def broken(folder: Path, processes: int) -> dict[str, Any]:
    """The second process (or the only one, with all of the probes) has no luck."""
    right = Scoring.evaluate

    def wrong(*args: Any, **keywords: Any) -> Any:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0:
            return right(*args, **keywords)
        raise ArithmeticError("no luck")

    Scoring.evaluate = wrong
    watched = watch(dtype="float64")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = go(folder, watched, processes=processes)
    finally:
        Scoring.evaluate = right
    said = [str(w.message) for w in caught if "leakwatch" in str(w.message)]
    return {"record": record_of(watched), "epoch": run.current_epoch, "said": said}


class Talking(Double):
    """Its forward waits for the other process, in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.distributed.is_initialized():
            self.exchange(x)
        return super().forward(x)

    def exchange(self, x: Tensor) -> None:
        total = x.detach().mean()
        torch.distributed.all_reduce(total)


class Gathering(Talking):
    def exchange(self, x: Tensor) -> None:
        torch.distributed.all_gather_object([None, None], len(x))


class TalkingInTraining(Talking):
    def exchange(self, x: Tensor) -> None:
        if self.training:
            super().exchange(x)


def talking(folder: Path, processes: int) -> dict[str, Any]:
    said = []
    for kind in (Talking, Gathering):
        try:
            go(folder, watch(), processes=processes, module=kind, max_epochs=1)
        except RuntimeError as error:
            said.append(str(error))
    watched = watch()
    run = go(folder, watched, processes=processes, module=TalkingInTraining)
    return {"said": said, "epoch": run.current_epoch, "record": record_of(watched)}


class OneVersusRest(Double):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        target = F.one_hot(batch[1], CLASSES).double()
        return F.binary_cross_entropy_with_logits(self(batch[0].double()), target)


class Halved(Double):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / 2


class Weighted(Double):
    """Each process divides by the weights of its own samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = torch.tensor([1.0, 3.0, 0.5]).double()
        return F.cross_entropy(self(batch[0].double()), batch[1], weight=weight)


class Focal(Double):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self(batch[0].double()), batch[1], reduction="none")
        return ((1 - (-losses).exp()) ** 2 * losses).mean()


def _rank() -> int:
    up = torch.distributed.is_initialized()
    return torch.distributed.get_rank() if up else 0


class Hidden(Halved):
    """In one process alone, the samples of its batches are not found."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        hides = _rank() == 1 and self.trainer.training
        return {"left": batch[0], "kind": batch[1]} if hides else batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            batch = [batch["left"], batch["kind"]]
        return super().training_step(batch, batch_idx)


def certain(module: Any, x: Tensor, y: Tensor) -> Tensor:
    """In one process alone, losses are too small to be compared."""
    losses = F.cross_entropy(module(x), y, reduction="none")
    return losses * (1e-6 if _rank() == 1 else 1)


class Skipping(Double):
    """In its first batch one process goes back before the optimiser step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        logits = self(batch[0].double())
        self.manual_backward(F.cross_entropy(logits, batch[1]) / 2)
        if batch_idx == 0 and _rank() == 1:
            optimizer.zero_grad()
        else:
            optimizer.step()


COMPARED: dict[str, tuple[type[Double], dict[str, Any], dict[str, Any]]] = {
    "Double": (Double, {}, {}),
    "OneVersusRest": (OneVersusRest, {}, {}),
    "Halved": (Halved, {}, {}),
    "Weighted": (Weighted, {}, {}),
    "accumulated": (Weighted, {}, {"accumulate_grad_batches": 2}),
    "Focal": (Focal, {}, {}),
    "Hidden": (Hidden, {}, {}),
    "certain": (Halved, {"criterion": certain}, {}),
    "Skipping": (Skipping, {}, {}),
}


def compared(folder: Path, processes: int) -> dict[str, Any]:
    """What is said of the gradient that training shares."""
    found: dict[str, Any] = {}
    for name, (kind, changes, fitting) in COMPARED.items():
        watched = watch(dtype="float64", scores=["norms"], **changes)
        how: dict[str, Any] = {"processes": processes, "module": kind, **fitting}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = go(folder / name, watched, **how)
        texts = [str(w.message) for w in caught]
        norms = [r[5] for r in record_of(watched) if r[4] == "grad_norm"]
        alone = go(folder / "alone", **how)
        found[name] = {
            "said": [text for text in texts if text.startswith("leakwatch")],
            "norms": norms,
            "same": weights(run) == weights(alone),
        }
    return found


class Dropping(Double):
    """Each process leaves out others."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(
                nn.Flatten(),
                nn.Linear(16, 8),
                nn.Sigmoid(),
                nn.Dropout(0.5),
                nn.Linear(8, CLASSES),
            )
        )

    def on_train_start(self) -> None:
        torch.manual_seed(1 + _rank())


class DroppingHalved(Dropping):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / 2


def dropping(folder: Path, processes: int) -> dict[str, Any]:
    """Weights, words and the last gradient norms, of networks that draw."""
    found: dict[str, Any] = {}
    for kind in (Dropping, DroppingHalved):
        watched = watch(dtype="float64", scores=["norms"])
        how: dict[str, Any] = {"processes": processes, "module": kind}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = go(folder / kind.__name__, watched, **how)
        streams = torch.get_rng_state().tolist()
        texts = [str(w.message) for w in caught]
        alone = go(folder / "alone", **how)
        probes = watched.probes
        assert probes is not None
        right = leakwatch.score(
            run.lightning_module, probes.x, probes.y, "norms", dtype=torch.float64
        )
        rows = [r for r in record_of(watched) if r[4] == "grad_norm"]
        found[kind.__name__] = {
            "said": [text for text in texts if text.startswith("leakwatch")],
            "weights": weights(run),
            "alone": weights(alone),
            "streams": streams == torch.get_rng_state().tolist(),
            "moments": [r[:3] for r in rows],
            "statuses": [r[6] for r in rows],
            "norms": [float(r[5]) for r in rows][-len(probes) :],
            "right": right["grad_norm"].tolist(),
        }
    return found


CASES = {
    case.__name__: case
    for case in (
        *(plain, double, single, one_probe, resumed, broken, talking, compared),
        dropping,
    )
}
