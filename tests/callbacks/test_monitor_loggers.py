from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from monitor_cases import (
    Tiny,
    TinyVal,
    fit,
    loader,
    moments_of,
    monitor,
    rows_of,
    trainer,
)
from test_audit import audit
from wandb_file import history, kept, media

import leakwatch
from leakwatch.callbacks import LeakageGate, LeakageMonitor
from leakwatch.callbacks._recording.loggers import _samples as samples_of
from leakwatch.callbacks._recording.loggers import publish_scalars
from leakwatch.callbacks._recording.summary import scalars_of
from leakwatch.reporting import Quantity, Row, log_scalars

NAMES = ("ant", "bee", "cat")


def expected_scalars(
    watched: LeakageMonitor,
) -> dict[tuple[int, int], dict[str, float]]:
    """Moment to what was to be logged, from the ledger."""
    assert watched.probes is not None
    found: dict[tuple[int, int], list[Row]] = {}
    for row in rows_of(watched):
        found.setdefault((row.epoch, row.step), []).append(row)
    return {
        moment: scalars_of(rows, watched.describe(), watched.probes, watched.name)
        for moment, rows in found.items()
    }


OVERVIEW = {
    "leakwatch/psnr/median",
    "leakwatch/psnr/worst",
    "leakwatch/psnr/share_above_20",
    "leakwatch/psnr/class_gap",
    "leakwatch/samples/known",
    "leakwatch/samples/unknown",
    "leakwatch/samples/bounds",
    "leakwatch/seconds",
    "leakwatch/time_fraction",
}


def test_the_keys_are_an_api(tmp_path: Path) -> None:
    watched = monitor(scores=["i2f_psnr", "i2f_lb"])
    fit(tmp_path, watched)
    keys = set(expected_scalars(watched)[1, 6])
    statistics = ("median", "p05", "p95", "worst")
    expected = set(OVERVIEW)
    for name in ("i2f_psnr", "i2f_lb", "grad_norm", "loss"):
        expected |= {f"leakwatch-detail/{name}/{s}" for s in statistics}
        expected |= {f"leakwatch-class/{c}/{name}" for c in range(3)}
        if name != "i2f_psnr":  # ratios of decibels mean nothing
            expected |= {
                f"leakwatch-detail/{name}/class_{s}" for s in ("ratio", "gini")
            }
    assert keys == expected


def test_loggers_get_ten_keys_unless_asked_for_all(tmp_path: Path) -> None:
    logger, watched = CSVLogger(tmp_path), monitor()
    key = "leakwatch-detail/i2f/p95"
    best = ModelCheckpoint(tmp_path / "best", monitor=key)
    run = fit(tmp_path, watched, best, logger=logger, enable_checkpointing=True)
    own = {k for k in csv_rows(logger)[0] if k.startswith("leakw")}
    axes = {"leakwatch/epoch", "leakwatch/step"}
    assert own == OVERVIEW | axes | {"leakwatch/lavp_l2_max/median"}
    # Callbacks have the same, and what one of them asks for.
    metrics = {k for k in run.callback_metrics if k.startswith("leakw")}
    assert metrics == own - axes | {key}
    assert best.best_model_score == run.callback_metrics[key]


def csv_rows(logger: CSVLogger) -> list[dict[str, str]]:
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def assert_scalars_in_csv(logger: CSVLogger, watched: LeakageMonitor) -> None:
    rows = [r for r in csv_rows(logger) if r["leakwatch/seconds"]]
    expected = expected_scalars(watched)
    found = [(int(r["leakwatch/epoch"]), int(r["leakwatch/step"])) for r in rows]
    assert found == list(expected)
    assert [int(r["step"]) for r in rows] == [step for _, step in found]
    for row, scalars in zip(rows, expected.values(), strict=True):
        own = {k: float(v) for k, v in row.items() if k.startswith("leakw") and v}
        del own["leakwatch/epoch"], own["leakwatch/step"]
        finite = {k: v for k, v in scalars.items() if math.isfinite(v)}
        assert set(own) == set(finite)
        assert own == pytest.approx(finite, rel=1e-6)


def test_csv(tmp_path: Path) -> None:
    logger, watched = CSVLogger(tmp_path), monitor(log="all")
    fit(tmp_path, watched, logger=logger, max_epochs=2)
    assert watched.run_directory == str(Path(logger.log_dir) / "leakwatch-run")
    assert_scalars_in_csv(logger, watched)
    assert any(row["train/loss_step"] for row in csv_rows(logger))


def test_several_loggers_at_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoardLogger(tmp_path / "board")
    tables = CSVLogger(tmp_path / "a"), CSVLogger(tmp_path / "b")
    watched = monitor(log="all")
    fit(tmp_path, watched, logger=[board, *tables], max_epochs=2)
    assert watched.run_directory == str(Path(board.log_dir) / "leakwatch-run")
    for table in tables:
        assert_scalars_in_csv(table, watched)
    events = EventAccumulator(board.log_dir, size_guidance={"histograms": 0})
    events.Reload()
    for (_, step), scalars in expected_scalars(watched).items():
        for key, value in scalars.items():
            found = {e.step: e.value for e in events.Scalars(key)}
            if math.isfinite(value):
                assert found[step] == pytest.approx(value, rel=1e-6)
            else:
                assert step not in found
    assert [h.step for h in events.Histograms("leakwatch-detail/spectrum")] == [
        0,
        6,
        12,
    ]
    assert (
        events.Histograms("leakwatch-detail/spectrum")[0].histogram_value.num == 3 * 16
    )
    assert events.Tags()["images"] == []


def test_no_logger_and_a_dry_run(tmp_path: Path) -> None:
    watched = monitor()
    fit(tmp_path / "none", watched)
    assert watched.run_directory == str(tmp_path / "none" / "leakwatch-run")
    watched = monitor(report=True)
    fit(tmp_path / "dry", watched, fast_dev_run=2, logger=True)
    assert watched.run_directory == str(tmp_path / "dry" / "leakwatch-run")
    assert moments_of(watched) == [(0, 0), (1, 2)]


class Notes:
    """A logger that refuses some keys, and with them all that came along."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.calls = 0
        self.seen: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.calls += 1
        for key in metrics:
            if key in self.refused:
                raise ValueError(f"invalid name {key}")
        assert step == 7
        self.seen.update(metrics)

    def save(self) -> None:
        self.seen["saved"] = 1.0


def test_values_that_are_no_numbers_are_left_out() -> None:
    logger = Notes()
    scalars = {"a": 1.0, "b": math.nan, "c": math.inf}
    refused = publish_scalars([logger], scalars, step=7)  # type: ignore[list-item]
    assert refused == []
    assert logger.seen == {"a": 1.0, "saved": 1.0}


def test_one_key_that_a_logger_refuses_costs_no_other() -> None:
    logger = Notes("b")
    scalars = {"a": 1.0, "b": 2.0, "c": 3.0}
    refused = publish_scalars([logger], scalars, step=7)  # type: ignore[list-item]
    assert refused == ["Notes raised RuntimeError: b: invalid name b"]
    assert logger.seen == {"a": 1.0, "c": 3.0, "saved": 1.0}


def test_a_logger_that_refuses_everything_is_not_asked_for_each_key() -> None:
    keys = [str(number) for number in range(60)]
    logger = Notes(*keys)
    refused = publish_scalars([logger], dict.fromkeys(keys, 1.0), step=7)  # type: ignore[list-item]
    assert refused == ["Notes raised ValueError: invalid name 0"]
    assert logger.calls == 4


def test_the_line_that_is_printed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        watched = monitor(verbose=True)
        fit(tmp_path, watched)
    lines = [
        r.getMessage() for r in caplog.records if "predicted PSNR" in r.getMessage()
    ]
    assert len(lines) == 2
    rows = [
        r for r in rows_of(watched) if r.epoch == 1 and r.quantity == "i2f_range_psnr"
    ]
    worst = max(rows, key=lambda r: r.value)
    assert lines[1].startswith(
        "leakwatch epoch 1 (step 6): predicted PSNR of an attacker who knows the "
        "range of pixels and the statistics of the data set"
    )
    assert "at noise_std=0.0001: " in lines[1]
    assert f"{worst.value:.1f} dB for the worst sample ({worst.sample})" in lines[1]


# -- Weights & Biases, offline -------------------------------------------------------


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "wandb-home"
    folder.mkdir()
    for name in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR", "ARTIFACT_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(folder))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    monkeypatch.setenv("WANDB_DISABLE_CODE", "true")
    monkeypatch.setenv("WANDB__DISABLE_STATS", "true")
    yield folder
    import wandb

    wandb.teardown()


def wandb_fit(tmp_path: Path, watched: LeakageMonitor, **changes: Any) -> WandbLogger:
    import wandb

    logger = WandbLogger(project="tests", save_dir=tmp_path, offline=True)
    fit(tmp_path, watched, logger=logger, module=TinyVal, val=loader(), **changes)
    wandb.finish()
    return logger


@pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb")
def test_wandb_holds_every_row_and_key(tmp_path: Path, offline: Path) -> None:
    watched = monitor(report=True, log="all")
    logger = wandb_fit(tmp_path, watched, max_epochs=2)
    rows = history(tmp_path)
    assert [r["_step"] for r in rows] == list(range(len(rows)))  # none was dropped
    scalars = [r for r in rows if "leakwatch/seconds" in r]
    expected = expected_scalars(watched)
    moments = [(r["leakwatch/epoch"], r["leakwatch/step"]) for r in scalars]
    assert moments == list(expected) == [(0, 0), (1, 6), (2, 12)]
    for row, wanted in zip(scalars, expected.values(), strict=True):
        own = {k: v for k, v in row.items() if k.startswith("leakwatch")}
        del own["leakwatch/epoch"], own["leakwatch/step"]
        finite = {k: v for k, v in wanted.items() if math.isfinite(v)}
        assert len(finite) > 60
        assert own == pytest.approx(finite, rel=1e-9)
    # Lightning's own rows are all there too, and no axis runs backwards.
    assert sum("train/loss_step" in r for r in rows) == 12
    assert sum("val/loss" in r for r in rows) == 2
    for axis in ("epoch", "trainer/global_step", "leakwatch/epoch", "leakwatch/step"):
        places = [r[axis] for r in rows if axis in r]
        assert places == sorted(places)

    tables = [r for r in rows if "leakwatch/samples" in r]
    assert [(r["leakwatch/epoch"], r["leakwatch/step"]) for r in tables] == moments
    ledger = [r for r in rows_of(watched) if r.sample is not None]
    for row in tables:
        # Each step adds its own rows to one table.
        samples = media(tmp_path, row["leakwatch/samples"])
        head, epoch = samples["columns"], row["leakwatch/epoch"]
        assert head[:5] == ["epoch", "step", "sample", "class", "bounds"]
        assert head[5:-1] == [s.name for s in watched.scores]
        assert len(samples["data"]) == 3
        for cells in samples["data"]:
            cell = dict(zip(head, cells, strict=True))
            own = [r for r in ledger if (r.epoch, r.sample) == (epoch, cell["sample"])]
            said = [f"{r.quantity}: {r.status}" for r in own if r.status != "ok"]
            assert cell["status"] == ("; ".join(said) or "ok")
            wanted = {r.quantity: r.value for r in own}
            assert {k: cell[k] for k in wanted} == pytest.approx(wanted, rel=1e-9)
    assert tables[-1]["leakwatch/samples"]["nrows"] == 9
    for row in (r for r in rows if "leakwatch-detail/spectrum" in r):
        spectrum = row["leakwatch-detail/spectrum"]
        assert spectrum["_type"] == "histogram"
        assert sum(spectrum["values"]) == 3 * 16
        assert len(spectrum["bins"]) == len(spectrum["values"]) + 1
    (figures,) = [r for r in rows if "leakwatch/figure/risk" in r]
    assert (figures["leakwatch/epoch"], figures["leakwatch/step"]) == (2, 12)
    for name in ("risk", "classes"):
        entry = figures[f"leakwatch/figure/{name}"]
        assert entry["_type"] == "plotly-file"
        assert media(tmp_path, entry)["data"]
    # The record has a directory of its own, and no private picture left it.
    assert watched.run_directory == str(
        tmp_path / "leakwatch-runs" / f"tests-{logger.version}" / "leakwatch-run"
    )
    assert not any("image" in str(row.get(k)) for row in rows for k in row)
    assert not list(tmp_path.rglob("*.png"))


def test_the_table_names_what_is_a_bound() -> None:
    said = "estimated: exposure is at least that: more may be seen"
    rows = [
        Row(0, 0, 7, 0, "i2f_psnr", 20.0, said),
        Row(0, 0, 7, 0, "i2f", 0.2, said),
        Row(0, 0, 7, 0, "loss", 0.2),
        Row(0, 0, 8, 0, "i2f_psnr", 20.0),
    ]
    low = {"i2f": Quantity("i2f", "", "higher = less exposed")}
    found = [sample["bounds"] for sample in samples_of(rows, NAMES, low)]
    assert found == ["≥ i2f_psnr, ≤ i2f", ""]
    assert log_scalars(rows)["leakwatch/samples/bounds"] == 1.0


def test_wandb_knows_settings_axes_and_what_to_keep(
    tmp_path: Path, offline: Path
) -> None:
    watched = monitor(noise_std=0.25)
    wandb_fit(tmp_path, watched, max_epochs=1)
    found = kept(tmp_path)
    settings = found.config["leakwatch"]
    assert settings["config"]["noise_std"] == 0.25
    assert settings["versions"]["leakwatch"] == leakwatch.__version__
    assert settings["probes"] == 3
    logged = {
        key
        for row in history(tmp_path)
        for key in row
        if key.startswith("leakw") and "figure" not in key and "samples" not in key
    }
    assert logged <= set(found.metrics)
    for key, metric in found.metrics.items():
        if key in logged - {"leakwatch/step"}:
            assert metric.step_metric == "leakwatch/step"
        assert metric.summary.max == (key == "leakwatch/psnr/worst")


@pytest.mark.filterwarnings("ignore:leakwatch. the gate")
def test_a_broken_gate_alerts(tmp_path: Path, offline: Path) -> None:
    import wandb

    logger = WandbLogger(project="tests", save_dir=tmp_path, offline=True)
    watched = monitor(at_start=False)
    fit(tmp_path, watched, LeakageGate(max_psnr=-99), logger=logger)
    wandb.finish()
    (text,) = kept(tmp_path).alerts
    assert "3 of 3 samples are above -99 dB" in text


@pytest.mark.parametrize("pictures", [False, True])
def test_the_ledger_goes_to_wandb_on_request(
    tmp_path: Path, offline: Path, pictures: bool
) -> None:
    watched = monitor(log_ledger=True, log_images=pictures, report=True)
    wandb_fit(tmp_path, watched, max_epochs=1)
    (names,) = [
        names
        for type_, names in kept(tmp_path).artifacts
        if type_ == "leakwatch-ledger"
    ]
    public = {"run.json", "ledger/part-000000.csv", "ledger/part-000001.csv"}
    assert public <= names
    assert (names > public) == ("probes.npz" in names) == pictures


def test_wandb_gets_pictures_on_request_only(tmp_path: Path, offline: Path) -> None:
    watched = monitor(log_images=True, scores=["grad_norm"])
    wandb_fit(tmp_path, watched, max_epochs=1)
    rows = history(tmp_path)
    (row,) = [r for r in rows if "leakwatch/probes" in r]
    assert row["leakwatch/probes"]["_type"] == "images/separated"
    assert row["leakwatch/probes"]["count"] == 3
    assert len(list(tmp_path.rglob("*.png"))) >= 3
    assert (row["leakwatch/epoch"], row["leakwatch/step"]) == (0, 0)


@pytest.mark.parametrize("wanted", [True, False])
def test_wandb_gets_reconstructions_on_request_only(
    tmp_path: Path, offline: Path, wanted: bool
) -> None:
    watched = audit(log_images=wanted)
    wandb_fit(tmp_path, watched, max_epochs=1)
    found = [
        row["leakwatch-audit/reconstructions"]
        for row in history(tmp_path)
        if "leakwatch-audit/reconstructions" in row
    ]
    pictures = list(tmp_path.rglob("*.png"))
    if not wanted:
        assert found == pictures == []
        return
    # Six samples, a near and a random attack on each: original, result, difference.
    assert [entry["count"] for entry in found] == [12]
    assert found[0]["width"] == 3 * 4
    assert "near start" in found[0]["captions"][0]
    assert len(pictures) >= 12


def test_a_trainer_without_any_logging(tmp_path: Path) -> None:
    watched = monitor()
    run = trainer(
        tmp_path, watched, barebones=True, logger=None, enable_checkpointing=None,
        enable_progress_bar=None, enable_model_summary=None, log_every_n_steps=None,
    )  # fmt: skip
    run.fit(Quiet(), loader())
    assert moments_of(watched) == [(0, 0), (1, 6)]


class Quiet(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).square().mean()
