"""Whatever goes wrong after the start becomes a status and one warning."""

from __future__ import annotations

import math
import re
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from monitor_cases import (
    Tiny,
    Watcher,
    dataset,
    fit,
    loader,
    moments_of,
    monitor,
    rows_of,
)
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from leakwatch.callbacks import LeakageMonitor
from leakwatch.callbacks._probing import run as probe_run
from leakwatch.callbacks._probing import session
from leakwatch.callbacks._recording import recorder
from leakwatch.reporting import (
    LedgerTable,
    RiskLedger,
    Row,
    quantities_from_metadata,
    summarize,
)
from leakwatch.reporting.extras import require
from leakwatch.scores import Scoring


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def ours(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if "leakwatch" in str(w.message)]


def fail_from(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, error: BaseException, n: int
) -> None:
    """The function raises from its n-th call on."""
    right, calls = getattr(place, name), []

    def wrong(*args: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) >= n:
            raise error
        return right(*args, **keywords)

    monkeypatch.setattr(place, name, wrong)


def by_epoch(rows: list[Row]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        if row.sample is not None:
            found.setdefault(row.epoch, []).append(row)
    return found


def test_an_exception_in_the_evaluation(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caught: list[warnings.WarningMessage],
) -> None:
    fail_from(monkeypatch, Scoring, "evaluate", ArithmeticError("bad\nluck"), 2)
    watched = monitor(log="all")
    run = fit(tmp_path, watched, max_epochs=3)
    assert run.current_epoch == 3
    (said,) = ours(caught)
    assert "42 of 42 values failed at epoch 1" in said
    assert "ArithmeticError: bad" in said
    rows = by_epoch(rows_of(watched))
    assert list(rows) == [0, 1, 2, 3]
    assert {r.status for r in rows[0]} == {"ok"}
    for epoch in (1, 2, 3):
        assert len(rows[epoch]) == 42
        (status,) = {r.status for r in rows[epoch]}
        assert status.startswith("failed: ArithmeticError: bad luck (test_monitor_")
        assert all(math.isnan(r.value) for r in rows[epoch])
    table = LedgerTable.from_rows(rows_of(watched))
    for name in ("i2f", "i2f_psnr", "lavp_l2_max"):
        found = summarize(table.columns[table.moments[-1], name], 1)
        assert found.used == 0
        assert math.isnan(found.worst)
        assert math.isnan(float(run.callback_metrics[f"leakwatch-detail/{name}/worst"]))


def test_weights_that_become_nan(
    tmp_path: Path, caught: list[warnings.WarningMessage]
) -> None:
    class Diverges(Tiny):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                with torch.no_grad():
                    self.net[1].weight[0, 0] = float("nan")

    watched = monitor()
    save = ModelCheckpoint(tmp_path / "c", save_last=True)
    run = fit(
        tmp_path,
        watched,
        save,
        module=Diverges,
        max_epochs=2,
        enable_checkpointing=True,
    )
    assert run.current_epoch == 2
    (said,) = ours(caught)
    assert "values failed at epoch 2" in said
    rows = by_epoch(rows_of(watched))
    assert {r.status for r in rows[1]} == {"ok"}
    words = {r.quantity: r.status.split(":")[0] for r in rows[2]}
    assert set(words.values()) == {"failed"}
    assert all(math.isnan(r.value) for r in rows[2])
    resumed = monitor()
    run = fit(
        tmp_path, resumed, module=Diverges, max_epochs=3,
        ckpt_path=tmp_path / "c" / "last.ckpt",
    )  # fmt: skip
    assert run.current_epoch == 3
    assert moments_of(resumed) == [(0, 0), (1, 6), (2, 12), (3, 18)]


class Raises(CSVLogger):
    """Takes the first step of Lightning's own metrics, and none of ours."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if any(key.startswith("leakwatch") for key in metrics):
            raise ConnectionError("no network")
        super().log_metrics(metrics, step)


def test_a_logger_that_raises_keeps_nothing_from_the_others(
    tmp_path: Path, caught: list[warnings.WarningMessage]
) -> None:
    good = CSVLogger(tmp_path / "good")
    watched = monitor()
    run = fit(tmp_path, watched, logger=[Raises(tmp_path / "bad"), good], max_epochs=2)
    assert run.current_epoch == 2
    assert ours(caught) == [
        "leakwatch: a logger refused values: Raises raised ConnectionError: no network"
    ]
    assert moments_of(watched) == [(0, 0), (1, 6), (2, 12)]
    text = (Path(good.log_dir) / "metrics.csv").read_text()
    assert "leakwatch/psnr/worst" in text.splitlines()[0]


@pytest.mark.parametrize("below", [True, False])
def test_a_directory_that_can_t_be_written(
    tmp_path: Path, caught: list[warnings.WarningMessage], below: bool
) -> None:
    """A file in the way: no permission keeps root from writing."""
    file = tmp_path / "file"
    file.write_text("mine")
    watched = monitor(directory=str(file / "record" if below else file), report=True)
    logger = CSVLogger(tmp_path / "logs")
    run = fit(tmp_path, watched, logger=logger, max_epochs=2)
    assert run.current_epoch == 2
    (said,) = ours(caught)
    assert f"nothing can be recorded in {watched.directory}" in said
    assert file.read_text() == "mine"
    assert watched.run_directory is None
    assert "leakwatch/psnr/worst" in run.callback_metrics
    text = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "leakwatch/psnr/worst" in text.splitlines()[0]


def test_a_disk_that_fills_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caught: list[warnings.WarningMessage],
) -> None:
    full = OSError(28, "No space left on device")
    fail_from(monkeypatch, recorder.RiskLedger, "append", full, 2)
    watched = monitor(report=True)
    run = fit(tmp_path, watched, max_epochs=3)
    assert run.current_epoch == 3
    (said,) = ours(caught)
    assert "a probe step was not recorded" in said
    assert "No space left" in said
    assert moments_of(watched) == [(0, 0)]
    assert watched.state_dict()["position"] == 1
    assert (tmp_path / "leakwatch-run" / "report.html").exists()


@pytest.mark.parametrize(
    ("place", "name", "words"),
    [
        (session, "scalars_of", "a probe step has no summary"),
        (probe_run, "merge_spectra", "recording a step failed"),
    ],
)
def test_a_mistake_of_ours_stops_no_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caught: list[warnings.WarningMessage],
    place: Any,
    name: str,
    words: str,
) -> None:
    fail_from(monkeypatch, place, name, KeyError("oops"), 2)
    run = fit(tmp_path, monitor(), max_epochs=3)
    assert run.current_epoch == 3
    (said,) = ours(caught)
    assert words in said


def test_without_plotly_there_is_a_ledger_and_no_report(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caught: list[warnings.WarningMessage],
) -> None:
    def missing(module: str, purpose: str) -> Any:
        if module.startswith("plotly"):
            return require("plotly_is_not_here", purpose)
        return require(module, purpose)

    from leakwatch.reporting.figures import style

    monkeypatch.setattr(style, "require", missing)
    watched = monitor(report=True)
    run = fit(tmp_path, watched)
    assert run.current_epoch == 1
    (said,) = ours(caught)
    assert "there is no report" in said
    assert "pip install jinja2 plotly pandas" in said
    assert moments_of(watched) == [(0, 0), (1, 6)]
    assert not (tmp_path / "leakwatch-run" / "report.html").exists()


def test_an_interrupt_passes_and_the_record_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_from(monkeypatch, Scoring, "evaluate", KeyboardInterrupt(), 3)
    watched = monitor(report=True)
    handler = signal.getsignal(signal.SIGINT)
    try:
        # Lightning's answer to Ctrl+C.
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fit(tmp_path, watched, max_epochs=5)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert moments_of(watched) == [(0, 0), (1, 6)]
    page = (tmp_path / "leakwatch-run" / "report.html").read_text("utf-8")
    assert "Training was interrupted in epoch 2, after step 12: nothing later" in page
    assert watched._session is None


def test_an_exception_of_the_training_itself(tmp_path: Path) -> None:
    class Breaks(Tiny):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                raise ArithmeticError("not ours")

    watched = monitor(report=True)
    with pytest.raises(ArithmeticError, match="not ours"):
        fit(tmp_path, watched, module=Breaks, max_epochs=5)
    assert moments_of(watched) == [(0, 0), (1, 6)]
    page = (tmp_path / "leakwatch-run" / "report.html").read_text("utf-8")
    assert "Training broke off with ArithmeticError in epoch 2, after step 6" in page
    assert "not ours" not in page


def test_an_exception_before_the_monitor_started(tmp_path: Path) -> None:
    class Breaks(Tiny):
        def on_fit_start(self) -> None:
            raise ArithmeticError("too early")

    with pytest.raises(ArithmeticError, match="too early"):
        fit(tmp_path, monitor(report=True), module=Breaks)


def test_training_after_a_failed_start(tmp_path: Path) -> None:
    """The same callback object, once its mistake is corrected."""
    watched = monitor()
    x, y = dataset().tensors
    bad = [(image, int(label) + 7) for image, label in zip(x, y, strict=True)]
    with pytest.raises(ValueError, match="outside the network's classes"):
        fit(tmp_path, watched, data=DataLoader(bad, batch_size=4))
    fit(tmp_path, watched, data=loader())
    assert moments_of(watched) == [(0, 0), (1, 6)]


def test_the_module_is_given_back_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **keywords: Any) -> Any:
        module = args[1].gradients.module
        module.eval()
        module.requires_grad_(False)
        torch.rand(3)
        raise ArithmeticError("halfway")

    def look(run: L.Trainer, module: L.LightningModule) -> Any:
        modes = [m.training for m in module.modules()]
        grads = [p.requires_grad for p in module.parameters()]
        weights = [p.detach().flatten().tolist() for p in module.parameters()]
        return modes, grads, weights, torch.get_rng_state().tolist()

    plain = Watcher(look)
    fit(tmp_path, plain, max_epochs=2)
    monkeypatch.setattr(Scoring, "evaluate", broken)
    seen = Watcher(look)
    with pytest.warns(UserWarning, match="halfway"):
        fit(tmp_path, monitor(), seen, max_epochs=2)
    assert seen.seen == plain.seen


def test_quantities_keep_their_direction_in_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_from(monkeypatch, Scoring, "evaluate", ArithmeticError("always"), 1)
    watched = monitor(report=True)
    with pytest.warns(UserWarning, match="always"):
        fit(tmp_path, watched)
    page = (tmp_path / "leakwatch-run" / "report.html").read_text()
    assert "the exposure is not known" in page
    from leakwatch.reporting import RiskLedger

    metadata = RiskLedger.open(tmp_path / "leakwatch-run").read_metadata()
    assert quantities_from_metadata(metadata)["i2f"].sign == -1
    assert "solver_used" not in metadata


class _Logging(Tiny):
    """A forward that logs, and later refuses its input by printing it."""

    def forward(self, x: Tensor) -> Tensor:
        self.log("mode", float(self.training), on_step=False, on_epoch=True)
        if not self.training and self.trainer.global_step > 0:
            raise AssertionError(f"bad input {x}")
        return super().forward(x)


def test_a_forward_that_logs_and_quotes_its_input(tmp_path: Path) -> None:
    watch = LeakageMonitor(probes=2, directory=str(tmp_path / "record"))
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch],
    )
    with pytest.warns(UserWarning, match="AssertionError"):
        trainer.fit(_Logging(), DataLoader(dataset(), batch_size=4))
    assert float(trainer.callback_metrics["mode"]) == 1.0
    rows = RiskLedger.open(tmp_path / "record").rows()
    failed = [row.status for row in rows if row.status.startswith("failed")]
    assert failed
    assert all("bad input" in status for status in failed)
    assert not any("tensor([" in s or re.search(r"\d\.\d", s) for s in failed)


def test_a_datamodule_s_normalisation_that_was_not_applied_is_not_believed(
    tmp_path: Path,
) -> None:
    class Raw(L.LightningDataModule):
        mean, std = (0.5,), (0.25,)

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(
                TensorDataset(torch.rand(16, 16), torch.arange(16) % 3), batch_size=8
            )

    watch = LeakageMonitor(probes=3, directory=str(tmp_path / "record"))
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch],
    )
    trainer.fit(Tiny(), datamodule=Raw())
    assert watch.probes is not None
    assert watch.probes.mean is None
    assert watch.probes.data_range == 1.0
