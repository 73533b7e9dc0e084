from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from monitor_cases import (
    Tiny,
    TinyVal,
    Watcher,
    fit,
    loader,
    moments_of,
    monitor,
    record_of,
    rows_of,
    trainer,
)

from leakwatch.callbacks import LeakageMonitor
from leakwatch.scores import Scoring

KEY = "leakwatch-detail/i2f_lb/median"


class EverySeventh(LeakageMonitor):
    def should_probe(self, step: int, epoch: int | None) -> bool:
        self.asked = [*getattr(self, "asked", []), (step, epoch)]
        return step % 7 == 0


def values(watched: LeakageMonitor, quantity: str = "i2f_lb") -> dict[int, float]:
    """Epoch to the median over three probes."""
    found: dict[int, list[float]] = {}
    for row in rows_of(watched):
        if row.quantity == quantity:
            found.setdefault(row.epoch, []).append(row.value)
    return {epoch: sorted(v)[1] for epoch, v in found.items()}


@pytest.mark.parametrize(
    ("arguments", "changes", "expected"),
    [
        ({}, {"max_epochs": 2}, [(0, 0), (1, 6), (2, 12)]),
        (
            {"every_n_epochs": 2, "at_start": False},
            {"max_epochs": 5},
            [(2, 12), (4, 24)],
        ),
        ({}, {"limit_train_batches": 2, "max_epochs": 2}, [(0, 0), (1, 2), (2, 4)]),
        ({}, {"accumulate_grad_batches": 4}, [(0, 0), (1, 2)]),
        ({}, {"max_steps": 4, "max_epochs": -1}, [(0, 0), (1, 4)]),
        ({}, {"overfit_batches": 2}, [(0, 0), (1, 2)]),
        ({}, {"max_epochs": 2, "limit_train_batches": 1}, [(0, 0), (1, 1), (2, 2)]),
    ],
)
def test_when_it_probes(
    tmp_path: Path,
    arguments: dict[str, Any],
    changes: dict[str, Any],
    expected: list[tuple[int, int]],
) -> None:
    watched = monitor(**arguments)
    fit(tmp_path, watched, data=loader(shuffle=False), **changes)
    assert moments_of(watched) == expected


def test_a_schedule_of_one_s_own(tmp_path: Path) -> None:
    watched = EverySeventh(3, report=False, verbose=False)
    fit(tmp_path, watched, max_epochs=3, accumulate_grad_batches=1)
    assert moments_of(watched) == [(0, 0), (1, 7), (2, 14)]
    asked = [(0, 0), *((s, s // 6 if s % 6 == 0 else None) for s in range(1, 19))]
    assert watched.asked == asked


def test_a_step_is_asked_about_once_while_gradients_accumulate(tmp_path: Path) -> None:
    watched = EverySeventh(3, report=False, verbose=False)
    fit(tmp_path, watched, max_epochs=2, accumulate_grad_batches=3)
    assert watched.asked == [(0, 0), (1, None), (2, 1), (3, None), (4, 2)]


def test_an_epoch_that_its_module_breaks_off(tmp_path: Path) -> None:
    class Breaks(Tiny):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    watched = monitor()
    fit(tmp_path, watched, module=Breaks, max_epochs=2)
    assert moments_of(watched) == [(0, 0), (1, 3), (2, 6)]


@pytest.mark.parametrize("validated", [True, False])
def test_a_checkpoint_monitors_it(tmp_path: Path, validated: bool) -> None:
    watched = monitor()
    best = ModelCheckpoint(
        tmp_path / "ckpt", monitor=KEY, mode="max", save_top_k=-1, filename="{epoch}"
    )
    fit(
        tmp_path,
        best,
        watched,
        module=TinyVal if validated else Tiny,
        val=loader() if validated else None,
        max_epochs=3,
        enable_checkpointing=True,
    )
    found = {
        int(Path(p).stem.split("=")[1]) + 1: float(v)
        for p, v in best.best_k_models.items()
    }
    expected = values(watched)
    assert found == pytest.approx({e: expected[e] for e in (1, 2, 3)}, rel=1e-6)
    assert float(best.best_model_score) == pytest.approx(max(found.values()))


@pytest.mark.parametrize("validated", [True, False])
def test_early_stopping_monitors_it(tmp_path: Path, validated: bool) -> None:
    watched = monitor()
    stop = EarlyStopping(KEY, mode="max", patience=0, min_delta=1e9)
    run = fit(
        tmp_path,
        stop,
        watched,
        module=TinyVal if validated else Tiny,
        val=loader() if validated else None,
        max_epochs=5,
    )
    assert run.current_epoch == 2  # the first sets the mark, the second is no better
    assert float(stop.best_score) == pytest.approx(values(watched)[1], rel=1e-6)


def test_every_key_can_be_monitored(tmp_path: Path) -> None:
    watched = monitor(log="all")
    run = fit(tmp_path, watched)
    latest = watched.state_dict()["latest"]
    assert {"leakwatch-class/2/i2f_psnr", "leakwatch/seconds", KEY} <= set(latest)
    assert {
        k: float(v) for k, v in run.callback_metrics.items() if k.startswith("leakw")
    } == pytest.approx(latest, rel=1e-6)


def test_a_key_is_there_in_epochs_without_a_probe(tmp_path: Path) -> None:
    """Also before the first one, in validation within an epoch, and after resuming."""

    def key(run: L.Trainer, _: Any) -> float:
        return float(run.callback_metrics[KEY])

    def go(watched: LeakageMonitor, **changes: Any) -> list[float]:
        look = Watcher(key, "batch")
        fit(
            tmp_path,
            watched,
            EarlyStopping(KEY, mode="max", patience=100),
            ModelCheckpoint(tmp_path / "c", monitor=KEY, every_n_train_steps=1),
            ModelCheckpoint(tmp_path / "d", save_last=True),
            look,
            module=TinyVal,
            data=loader(shuffle=False),
            val=loader(),
            val_check_interval=2,
            enable_checkpointing=True,
            **changes,
        )
        return look.seen

    watched = monitor(every_n_epochs=2)
    seen = go(watched, max_epochs=3)
    found = values(watched)
    expected = [found[0]] * 11 + [found[2]] * 7
    assert seen == pytest.approx(expected, rel=1e-6)
    resumed = monitor(every_n_epochs=2)
    seen = go(resumed, max_epochs=4, ckpt_path=tmp_path / "d" / "last.ckpt")
    found = values(resumed)
    assert seen == pytest.approx([found[2]] * 5 + [found[4]], rel=1e-6)


def test_a_scheduler_monitors_it(tmp_path: Path) -> None:
    class Plateau(Tiny):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, mode="max", patience=0, threshold=1e9
            )
            return [optimizer], [{"scheduler": scheduler, "monitor": KEY}]

    watched = monitor(every_n_epochs=10)
    run = fit(tmp_path, watched, module=Plateau, max_epochs=3)
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_failed_probe_leaves_no_old_value_to_monitor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fails(*args: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError("no luck")
        return evaluate(*args, **keywords)

    evaluate = Scoring.evaluate
    monkeypatch.setattr(Scoring, "evaluate", fails)
    watched = monitor()
    best = ModelCheckpoint(tmp_path / "c", monitor=KEY, mode="max", filename="{epoch}")
    stop = EarlyStopping(KEY, mode="max", patience=9, check_finite=False)
    look = Watcher(lambda run, _: float(run.callback_metrics[KEY]))
    with pytest.warns(UserWarning, match="no luck"):
        run = fit(
            tmp_path, watched, best, stop, look, max_epochs=3,
            enable_checkpointing=True,
        )  # fmt: skip
    assert run.current_epoch == 3
    assert math.isnan(look.seen[0])
    assert math.isfinite(look.seen[1])
    assert "epoch=0" not in best.best_model_path


def test_evaluation_does_nothing(tmp_path: Path) -> None:
    class Tested(TinyVal):
        pass

    watched = monitor()
    run = trainer(tmp_path, watched)
    run.validate(Tested(), loader(), verbose=False)
    run.test(Tested(), loader(), verbose=False)
    assert watched.run_directory is None
    assert not (tmp_path / "leakwatch-run").exists()


def test_two_monitors_in_one_trainer(tmp_path: Path) -> None:
    one = monitor(log="all")
    two = monitor(name="second", dtype="float64", scores=["lavp"], log="all")
    run = fit(tmp_path, one, two, max_epochs=2)
    assert one.run_directory == str(tmp_path / "leakwatch-run")
    assert two.run_directory == str(tmp_path / "second-run")
    assert one.state_key != two.state_key
    assert moments_of(one) == moments_of(two) == [(0, 0), (1, 6), (2, 12)]
    alone = monitor()
    fit(tmp_path / "alone", alone, max_epochs=2)
    assert record_of(one) == record_of(alone)
    keys = {k.split("/")[0] for k in run.callback_metrics}
    ours = {
        f"{a}{b}" for a in ("leakwatch", "second") for b in ("", "-class", "-detail")
    }
    assert keys == {"train"} | ours
    assert "second-detail/lavp_l2_max/worst" in run.callback_metrics
    assert "second-detail/i2f/worst" not in run.callback_metrics


def test_two_monitors_of_one_name_are_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, monitor(), monitor(seed=4))
    with pytest.raises(RuntimeError, match=r"'leakwatch' and .*name='leakwatch-test'"):
        run.fit(Tiny(), loader())
    sub = EverySeventh(3, verbose=False)
    run = trainer(tmp_path, monitor(), sub)
    with pytest.raises(RuntimeError, match=r"two callbacks are called 'leakwatch'"):
        run.fit(Tiny(), loader())


def test_two_monitors_in_one_directory_are_kept_apart(tmp_path: Path) -> None:
    directory = str(tmp_path / "record")
    for last in (1, 2):
        one = monitor(directory=directory)
        two = monitor(directory=directory, name="second", seed=3)
        save = ModelCheckpoint(tmp_path / "c", save_last=True)
        path = tmp_path / "c" / "last.ckpt"
        fit(
            tmp_path, one, two, save, max_epochs=last, enable_checkpointing=True,
            ckpt_path=path if last == 2 else None,
        )  # fmt: skip
    assert one.run_directory == directory
    assert two.run_directory == f"{directory}-1"
    assert moments_of(one) == moments_of(two) == [(0, 0), (1, 6), (2, 12)]


class FSDPStrategy:
    pass


class DeepSpeedStrategy:
    pass


class OwnFSDP(FSDPStrategy):
    pass


@pytest.mark.parametrize(
    ("strategy", "word"),
    [(FSDPStrategy, "FSDP"), (DeepSpeedStrategy, "DeepSpeed"), (OwnFSDP, "FSDP")],
)
def test_sharded_strategies_are_refused_in_setup(strategy: Any, word: str) -> None:
    class Fake:
        def __init__(self) -> None:
            self.strategy = strategy()

    with pytest.raises(RuntimeError, match=rf"can't run under strategy={word}: .*ddp"):
        monitor().setup(Fake(), Tiny(), "fit")  # type: ignore[arg-type]
    monitor().setup(Fake(), Tiny(), "validate")  # type: ignore[arg-type]
