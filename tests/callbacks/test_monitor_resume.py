"""Interrupted and resumed equals uninterrupted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from monitor_cases import (
    Tiny,
    dataset,
    fit,
    loader,
    moments_of,
    monitor,
    record_of,
    rows_of,
    trainer,
)
from reporting.writers import writer_of
from torch.utils.data import DataLoader, TensorDataset

from leakwatch import ProbeSet
from leakwatch.callbacks import LeakageMonitor
from leakwatch.reporting import RiskLedger

EPOCHS = 4


class EveryThird(LeakageMonitor):
    def should_probe(self, step: int, epoch: int | None) -> bool:
        return step % 3 == 0 or super().should_probe(step, epoch)


def every_third(**changes: Any) -> EveryThird:
    return EveryThird(3, report=False, verbose=False, every_n_epochs=2, **changes)


def by_epoch(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)


def by_step(folder: Path, n: int) -> ModelCheckpoint:
    return ModelCheckpoint(
        folder, filename="{step}", save_top_k=-1, every_n_train_steps=n
    )


def go(root: Path, *callbacks: Any, **changes: Any) -> L.Trainer:
    """All batches are the same: Lightning starts a broken epoch with the first one."""
    changes = {"max_epochs": EPOCHS, "enable_checkpointing": True} | changes
    x, y = dataset().tensors
    same = TensorDataset(x[:4].repeat(6, 1, 1, 1), y[:4].repeat(6))
    return fit(root, *callbacks, data=DataLoader(same, batch_size=4), **changes)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Without interruption, with a checkpoint at every step and epoch."""
    root = tmp_path_factory.mktemp("long")
    watched = every_third()
    run = go(
        root,
        watched,
        by_epoch(root / "epochs"),
        by_step(root / "steps", 1),
        logger=CSVLogger(root / "logs"),
    )
    assert watched.run_directory is not None
    assert run.global_step == 24
    return {
        "root": root,
        "directory": watched.run_directory,
        "record": record_of(watched),
        "moments": moments_of(watched),
    }


def test_the_uninterrupted_run(long_run: dict[str, Any]) -> None:
    assert long_run["moments"] == [
        (0, 0), (0, 3), (1, 6), (1, 9), (2, 12), (2, 15), (3, 18), (3, 21), (4, 24),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "checkpoint",
    [f"epochs/epoch={e}.ckpt" for e in range(EPOCHS - 1)]
    + [f"steps/step={s}.ckpt" for s in (3, 8, 23)],
)
def test_resumed_in_a_new_log_directory(
    tmp_path: Path, long_run: dict[str, Any], checkpoint: str
) -> None:
    watched = every_third()
    path = long_run["root"] / checkpoint
    go(tmp_path, watched, ckpt_path=path, logger=CSVLogger(tmp_path / "logs"))
    assert watched.run_directory is not None
    assert Path(watched.run_directory).is_relative_to(tmp_path)
    assert record_of(watched) == long_run["record"]
    old = RiskLedger.open(long_run["directory"])
    assert len(old.rows()) > len(long_run["record"])  # with its times, untouched
    new = RiskLedger.open(watched.run_directory)
    assert new.run == old.run
    assert new.read_metadata()["created"] == old.read_metadata()["created"]
    for found, expected in zip(new.spectra(), old.spectra(), strict=True):
        np.testing.assert_array_equal(found["eigenvalues"], expected["eigenvalues"])


def test_interrupted_at_each_epoch_and_resumed_in_the_same_directory(
    tmp_path: Path, long_run: dict[str, Any]
) -> None:
    directory = str(tmp_path / "record")
    checkpoint = None
    for epochs in range(1, EPOCHS + 1):
        watched = every_third(directory=directory)
        go(
            tmp_path,
            watched,
            ModelCheckpoint(tmp_path / "last", save_last=True),
            ckpt_path=checkpoint,
            max_epochs=epochs,
        )
        checkpoint = tmp_path / "last" / "last.ckpt"
        assert watched.run_directory == directory
    assert record_of(watched) == long_run["record"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "record"]
    fractions = [r.value for r in rows_of(watched) if r.quantity == "time_fraction"][1:]
    assert all(0 < f <= 1 for f in fractions)


def test_resuming_from_an_early_checkpoint_cuts_back_and_keeps_what_it_replaces(
    tmp_path: Path, long_run: dict[str, Any]
) -> None:
    directory = tmp_path / "record"
    shutil.copytree(long_run["directory"], directory)
    checkpoint = moved(long_run["root"] / "epochs/epoch=0.ckpt", tmp_path, directory)
    measured = {p.name: p.read_bytes() for p in (directory / "ledger").iterdir()}
    count = len([r for r in long_run["record"] if r[0] <= 2 and r[1] <= 12])
    for number in "12":
        watched = every_third(directory=str(directory))
        go(tmp_path, watched, ckpt_path=checkpoint, max_epochs=2)
        assert watched.run_directory == str(directory)
        assert record_of(watched) == long_run["record"][:count]
        assert RiskLedger(directory).problems == ()
        aside = {
            p.name: p.read_bytes()
            for p in (directory / "replaced" / number / "ledger").iterdir()
        }
        assert min(aside) == "part-000003.csv"
        if number == "1":
            kept = {n: data for n, data in measured.items() if n < "part-000003"}
            assert kept | aside == measured
    assert not (tmp_path / "record-1").exists()


def test_a_run_that_another_process_goes_on_with_is_left_to_it(
    tmp_path: Path, long_run: dict[str, Any]
) -> None:
    directory = tmp_path / "record"
    shutil.copytree(long_run["directory"], directory)
    checkpoint = moved(long_run["root"] / "epochs/epoch=0.ckpt", tmp_path, directory)
    before = {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    with writer_of(directory):
        watched = every_third(directory=str(directory))
        go(tmp_path, watched, ckpt_path=checkpoint, max_epochs=2)
    assert watched.run_directory == str(tmp_path / "record-1")
    assert moments_of(watched)[:3] == long_run["moments"][:3]
    after = {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    assert after == before | {directory / ".lock": b""}


def test_a_checkpoint_that_is_older_than_the_first_part(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"directory": str(tmp_path / "record"), "at_start": False}
    whole = monitor(**changes)
    go(tmp_path, whole, by_step(tmp_path / "saved", 1), max_epochs=2)
    expected = record_of(whole)
    watched = monitor(**changes)
    go(tmp_path, watched, ckpt_path=tmp_path / "saved/step=2.ckpt", max_epochs=2)
    assert watched.run_directory == whole.run_directory
    assert record_of(watched) == expected


def moved(checkpoint: Path, tmp_path: Path, directory: Path) -> Path:
    """The checkpoint as if its run had been recorded elsewhere."""
    state = torch.load(checkpoint, weights_only=True)
    for entry in state["callbacks"].values():
        if "fingerprint" in entry:
            entry["directory"] = str(directory)
    path = tmp_path / "moved.ckpt"
    torch.save(state, path)
    return path


def test_a_new_run_never_overwrites_an_old_one(tmp_path: Path) -> None:
    directories = []
    for _ in range(3):
        watched = monitor(directory=str(tmp_path / "record"))
        fit(tmp_path, watched)
        directories.append(Path(str(watched.run_directory)).name)
        assert moments_of(watched) == [(0, 0), (1, 6)]
    assert directories == ["record", "record-1", "record-2"]


def test_another_run_in_the_checkpoint_s_directory_is_left_alone(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "record"
    fit(
        tmp_path,
        monitor(directory=str(directory)),
        by_epoch(tmp_path / "ckpt"),
        enable_checkpointing=True,
    )
    shutil.rmtree(directory)
    fit(tmp_path, monitor(directory=str(directory)))
    before = (directory / "run.json").read_bytes()
    watched = monitor(directory=str(directory))
    with pytest.warns(UserWarning, match=r"the record before the checkpoint is lost"):
        fit(
            tmp_path, watched, ckpt_path=tmp_path / "ckpt" / "epoch=0.ckpt",
            max_epochs=2,
        )  # fmt: skip
    assert watched.run_directory == str(tmp_path / "record-1")
    assert moments_of(watched) == [(2, 12)]
    assert (directory / "run.json").read_bytes() == before


def test_a_lost_record_is_said_and_training_goes_on(
    tmp_path: Path, long_run: dict[str, Any]
) -> None:
    checkpoint = moved(
        long_run["root"] / "epochs/epoch=1.ckpt", tmp_path, tmp_path / "gone"
    )
    watched = every_third()
    with pytest.warns(UserWarning, match=r"the record before the checkpoint is lost"):
        run = go(tmp_path, watched, ckpt_path=checkpoint)
    assert run.current_epoch == EPOCHS
    assert moments_of(watched) == long_run["moments"][5:]


def test_the_checkpoint_is_plain_and_holds_no_pixel(long_run: dict[str, Any]) -> None:
    path = long_run["root"] / "epochs/epoch=1.ckpt"
    state = torch.load(path, weights_only=True)["callbacks"]
    (key,) = [k for k in state if "EveryThird" in k]
    assert key == "EveryThird{'name': 'leakwatch'}"
    assert state[key].keys() == {
        "run", "directory", "position", "epoch_asked", "epoch_asked_at", "step_asked",
        "spent", "elapsed", "latest", "indices", "fingerprint", "left_out", "cost",
        "factors",
    }  # fmt: skip
    assert state[key]["position"] == 5
    assert state[key]["epoch_asked"] == 2
    assert all(type(v) in (str, int, float, list, dict) for v in state[key].values())
    assert {type(v) for v in state[key]["latest"].values()} == {float}
    raw = path.read_bytes()
    for image in dataset().tensors[0][:4]:
        assert image.numpy().tobytes() not in raw
    assert state[key]["indices"] != [0, 1, 2]


def test_other_probes_after_a_checkpoint_are_said(
    tmp_path: Path, long_run: dict[str, Any]
) -> None:
    x, y = dataset(seed=5).tensors
    watched = every_third()
    watched.given = ProbeSet.from_tensors(x[:3], y[:3])
    with pytest.warns(UserWarning, match=r"the probes are not those"):
        go(tmp_path, watched, ckpt_path=long_run["root"] / "epochs/epoch=1.ckpt")


def test_the_drawn_probes_stay_when_the_seed_changes(
    tmp_path: Path, long_run: dict[str, Any]
) -> None:
    watched = every_third(seed=9)
    go(tmp_path, watched, ckpt_path=long_run["root"] / "epochs/epoch=1.ckpt")
    assert record_of(watched) == long_run["record"]


def test_a_checkpoint_made_without_the_monitor(tmp_path: Path) -> None:
    fit(tmp_path, by_epoch(tmp_path / "ckpt"), enable_checkpointing=True)
    watched = monitor()
    path = tmp_path / "ckpt" / "epoch=0.ckpt"
    fit(tmp_path, watched, ckpt_path=path, max_epochs=2)
    assert moments_of(watched) == [(2, 12)]


def test_fit_again_with_the_same_trainer_goes_on_with_the_record(
    tmp_path: Path,
) -> None:
    watched = monitor()
    L.seed_everything(0, verbose=False)
    module, run = Tiny(), trainer(tmp_path, watched)
    run.fit(module, loader(shuffle=False))
    first = watched.run_directory
    run.fit_loop.max_epochs = 3
    run.fit(module, loader(shuffle=False))
    assert watched.run_directory == first
    assert moments_of(watched) == [(0, 0), (1, 6), (2, 12), (3, 18)]


def test_evaluation_between_two_fits_changes_nothing(tmp_path: Path) -> None:
    class Tested(Tiny):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test/x", batch[0].mean())

    watched = monitor()
    L.seed_everything(0, verbose=False)
    module = Tested()
    run = trainer(
        tmp_path, watched, by_epoch(tmp_path / "ckpt"), enable_checkpointing=True
    )
    run.fit(module, loader())
    state = watched.state_dict()
    run.test(
        module,
        loader(),
        ckpt_path=str(tmp_path / "ckpt" / "epoch=0.ckpt"),
        verbose=False,
    )
    assert watched.state_dict() == state
    run.fit_loop.max_epochs = 2
    run.fit(module, loader())
    assert moments_of(watched) == [(0, 0), (1, 6), (2, 12)]


def test_one_callback_in_a_second_trainer_starts_a_second_run(tmp_path: Path) -> None:
    watched = monitor()
    fit(tmp_path / "a", watched)
    first, record = watched.run_directory, record_of(watched)
    fit(tmp_path / "b", watched)
    assert watched.run_directory == str(tmp_path / "b" / "leakwatch-run")
    assert record_of(watched) == record
    second = RiskLedger.open(tmp_path / "b" / "leakwatch-run")
    assert RiskLedger.open(str(first)).run != second.run

    fit(tmp_path / "c", watched, data=loader(n=40, seed=3))
    assert watched.probes is not None
    x = torch.stack([dataset(40, seed=3)[i][0] for i in watched.probes.index])
    torch.testing.assert_close(watched.probes.x, x, rtol=0, atol=0)
    assert moments_of(watched) == [(0, 0), (1, 10)]


def test_resuming_with_other_assumptions_is_said(tmp_path: Path) -> None:
    directory = str(tmp_path / "record")
    changes = {"report": False, "verbose": False, "directory": directory}
    go(
        tmp_path,
        LeakageMonitor(2, **changes),
        by_epoch(tmp_path / "saved"),
        max_epochs=1,
    )
    (saved,) = (tmp_path / "saved").glob("*.ckpt")
    watched = LeakageMonitor(2, noise_std=1.0, **changes)
    with pytest.warns(UserWarning, match=r"noise_std=0\.0001, now 1\.0"):
        go(tmp_path, watched, max_epochs=2, ckpt_path=str(saved))
    assert watched.run_directory is not None
    notes = RiskLedger.open(watched.run_directory).read_metadata()["notes"]
    assert "other assumptions" in notes[0]
