from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from reporting.audits import attacked
from torch import nn

from leakwatch import __version__
from leakwatch.callbacks import LeakageMonitor
from leakwatch.cli import main
from leakwatch.cli.checkpoint import Checkpoint, load_weights, read_checkpoint
from leakwatch.cli.main import explain, shorten
from leakwatch.cli.report import find_run
from leakwatch.cli.tables import run_table, score_table
from leakwatch.reporting import RiskLedger, Row

pytestmark = pytest.mark.filterwarnings(
    # What Lightning says about tiny runs: few batches, no validation.
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
)

MONITOR = {
    "class_path": "leakwatch.callbacks.LeakageMonitor",
    "init_args": {"probes": 4, "scores": ["lavp", "i2f"], "verbose": False},
}
# With a setting that nothing has.
NOISY = json.dumps([{**MONITOR, "init_args": {"noise": 0.1}}])
CHECKPOINTS = {
    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
    "init_args": {"filename": "best", "monitor": "val/acc", "mode": "max"},
}


def toy(folder: Path, callbacks: list[Any]) -> dict[str, Any]:
    """A linear model on 60 pictures of 5×5, with 3 classes."""
    generator = np.random.default_rng(0)
    path = folder / "images.npz"
    np.savez(
        path,
        train_images=generator.integers(0, 256, (60, 5, 5), dtype=np.uint8),
        train_labels=np.arange(60) % 3,
        classes=np.array(["cat", "dog", "owl"]),
    )
    return {
        "seed_everything": 1,
        "model": {
            "class_path": "leakwatch.models.LitClassifier",
            "init_args": {
                "model": "mlp",
                "model_args": {"hidden_sizes": [6]},
                "num_classes": 3,
                "image_size": 5,
            },
        },
        "data": {
            "class_path": "leakwatch.datamodules.ArrayDataModule",
            "init_args": {"path": str(path), "batch_size": 9, "val_fraction": 0.3},
        },
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 2,
            "default_root_dir": str(folder),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": {
                "class_path": "lightning.pytorch.loggers.CSVLogger",
                "init_args": {"save_dir": str(folder), "name": "logs"},
            },
            "callbacks": callbacks,
        },
    }


def write(path: Path, config: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(config))
    return str(path)


@dataclass(frozen=True)
class Run:
    folder: Path
    config: str
    out: str
    status: int

    @property
    def ledger(self) -> Path:
        return self.folder / "logs/version_0/leakwatch-run"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "logs/version_0/checkpoints/best.ckpt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("trained")
    config = write(folder / "toy.yaml", toy(folder, [CHECKPOINTS, MONITOR]))
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *a, **k: lines.append(" ".join(a)))
        status = main(["fit", "--config", config])
    return Run(folder, config, "\n".join(lines), status)


@pytest.fixture(autouse=True)
def _same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("LEAKWATCH_DEBUG", raising=False)


def sentence(capsys: pytest.CaptureFixture[str], command: str) -> str:
    """What a command said on stderr: one line that is no traceback."""
    lines = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith(("leakwatch", "Traceback", " "))
    ]
    assert len(lines) == 1
    start = f"{command}: error: "
    assert lines[0].startswith(start)
    return lines[0].removeprefix(start)


# -- the command itself ------------------------------------------------------------


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-h", "--help"):
        assert main([flag]) == 0
        text = capsys.readouterr().out
        assert all(word in text for word in ("fit", "audit", "report", "LEAKWATCH"))
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"leakwatch {__version__}\n"


def test_no_command_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage: leakwatch COMMAND" in captured.err


@pytest.mark.parametrize(
    ("command", "hint"), [("adit", "did you mean 'audit'? "), ("xyzzy", "")]
)
def test_unknown_command(
    command: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command]) == 2
    assert sentence(capsys, "leakwatch") == (
        f"unknown command {command!r}; {hint}choose from fit, audit, attack, "
        "compare-inits, trade-off, reproduce, report, show, compare, export, check, "
        "dashboard, configs."
    )


@pytest.mark.parametrize(
    "command",
    [
        "audit",
        "attack",
        "compare-inits",
        "trade-off",
        "report",
        "show",
        "compare",
        "export",
        "check",
        "configs",
        "dashboard",
    ],
)
def test_help_of_one_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"usage: leakwatch {command}" in capsys.readouterr().out


def test_help_of_fit_is_one_screen_with_the_monitor_s_options() -> None:
    code = (
        "import sys; from leakwatch.cli import main; main(['fit', '--help'])\n"
        "print('heavy:', sorted({'torch', 'lightning'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    *lines, heavy = done.stdout.splitlines()
    assert heavy == "heavy: []"
    assert len(lines) <= 60
    words = set(re.findall(r"\w+", done.stdout))
    assert set(inspect.signature(LeakageMonitor).parameters) <= words


def test_help_of_fit_lists_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--help-all"]) == 0
    text = capsys.readouterr().out
    assert "usage: leakwatch fit" in text
    assert "--trainer.max_epochs" in text
    assert "--ckpt_path" in text


def test_light_commands_import_no_torch(trained: Run) -> None:
    code = (
        "import sys; from leakwatch.cli import main\n"
        "for argv in (['--help'], ['--version'], ['fit'], ['audit', '--help'],\n"
        "             ['configs'], ['report', sys.argv[1]]): main(argv)\n"
        "print('heavy:', sorted({'torch', 'lightning', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(trained.ledger)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "heavy: []"
    assert str(trained.ledger / "report.html") in done.stdout


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "leakwatch", "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("leakwatch: error: unknown command 'nonsense'")


# -- fit -----------------------------------------------------------------------------


def test_fit_records_and_summarises(trained: Run) -> None:
    assert trained.status == 0
    ledger = RiskLedger.open(trained.ledger)
    assert {row.epoch for row in ledger.rows()} == {0, 1, 2}
    lines = trained.out.splitlines()
    header = next(i for i, line in enumerate(lines) if "worst sample" in line)
    expected = ["epoch", "median", "worst", "worst", "sample", "val/acc"]
    assert lines[header].split() == expected
    cells = [line.split() for line in lines[header + 1 : header + 4]]
    assert [row[0] for row in cells] == ["0", "1", "2"]
    assert cells[0][-1] == "–"
    assert all(0 <= float(row[-1]) <= 1 for row in cells[1:])
    assert f"report: {trained.ledger / 'report.html'}" in lines
    assert (trained.ledger / "report.html").stat().st_size > 10_000


def test_table_shows_what_the_ledger_holds(trained: Run) -> None:
    rows = [
        row
        for row in RiskLedger.open(trained.ledger).rows()
        if (row.epoch, row.quantity) == (2, "i2f_range_psnr")
    ]
    worst = max(rows, key=lambda row: row.value)
    assert worst.label is not None
    name = ("cat", "dog", "owl")[worst.label]
    median = float(np.median([row.value for row in rows]))
    text = run_table(trained.ledger, ("val/acc", {2: 0.5}))
    line = text.partition("\n\nPredictions hold for")[0].splitlines()[-1]
    assert line.split() == [
        "2",
        f"{median:.1f}",
        f"{worst.value:.1f}",
        str(worst.sample),
        "(class",
        f"{name})",
        "0.500",
    ]


def test_accuracy_is_that_of_its_epoch(trained: Run) -> None:
    metrics = (trained.folder / "logs/version_0/metrics.csv").read_text().splitlines()
    names = metrics[0].split(",")
    measured = [
        float(cells[names.index("val/acc")])
        for cells in (line.split(",") for line in metrics[1:])
        if cells[names.index("val/acc")]
    ]
    table = [line for line in trained.out.splitlines() if "(class" in line]
    shown = [float(line.split()[-1]) for line in table[1:]]
    torch.testing.assert_close(shown, measured, rtol=0, atol=6e-4)


def test_config_is_saved_beside_log_and_ledger(trained: Run) -> None:
    for place in (trained.ledger, trained.ledger.parent):
        saved = yaml.safe_load((place / "config.yaml").read_text())
        if place == trained.ledger and os.name == "posix":
            assert (place / "config.yaml").stat().st_mode & 0o077 == 0
        assert saved["seed_everything"] == 1
        assert saved["model"]["init_args"]["model_args"] == {"hidden_sizes": [6]}


def test_a_second_run_in_one_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = toy(tmp_path, [MONITOR])
    config["trainer"] |= {"logger": False, "enable_checkpointing": False}
    path = write(tmp_path / "toy.yaml", config)
    for name in ("leakwatch-run", "leakwatch-run-1"):
        assert main(["fit", "--config", path, "--trainer.max_epochs=1"]) == 0
        assert f"report: {tmp_path / name / 'report.html'}" in capsys.readouterr().out
        assert (tmp_path / name / "config.yaml").is_file()


def test_fit_without_a_monitor_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "toy.yaml", toy(tmp_path, []))
    assert main(["fit", "-c", path, "--trainer.fast_dev_run=true"]) == 0
    assert "Nothing was watched" in capsys.readouterr().out


def test_a_schedule_that_never_came_claims_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = {**MONITOR["init_args"], "every_n_epochs": 5, "at_start": False}
    path = write(tmp_path / "toy.yaml", toy(tmp_path, [{**MONITOR, "init_args": late}]))
    with pytest.warns(UserWarning, match="every_n_epochs=5, but training ends after 2"):
        assert main(["fit", "--config", path]) == 0
    out = capsys.readouterr().out
    assert f"Nothing was recorded in {tmp_path / 'logs/version_0/leakwatch-run'}" in out
    assert "recorded in:" not in out
    assert "report:" not in out


def test_a_model_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_module_for_cli.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(25, 3))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    config = toy(tmp_path, [MONITOR])
    config["model"]["init_args"] = {
        "model": {"class_path": "my_module_for_cli.Net"},
        "num_classes": 3,
    }
    path = write(tmp_path / "toy.yaml", config)
    assert main(["fit", "--config", path, "--trainer.max_epochs=1"]) == 0
    assert "val/acc" in capsys.readouterr().out
    metadata = RiskLedger.open(find_run(tmp_path)).read_metadata()
    assert metadata["parameters"] == 25 * 3 + 3


def test_configs_in_any_order(tmp_path: Path) -> None:
    whole = toy(tmp_path, [MONITOR])
    size = {"image_size": whole["model"]["init_args"].pop("image_size")}
    model = write(tmp_path / "model.yaml", {"model": whole.pop("model")})
    data = write(tmp_path / "data.yaml", {**whole, "model": {"init_args": size}})
    for order in ((model, data), (data, model)):
        configs = [option for path in order for option in ("--config", path)]
        fast = ["--trainer.fast_dev_run=true", "--trainer.callbacks.report=false"]
        assert main(["fit", *configs, *fast]) == 0


# -- mistakes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        (
            ["--model.init_args.lrr=3"],
            2,
            "LitClassifier: Option 'lrr' .*; did you mean 'lr'",
        ),
        (["--model.init_args.lr=abc"], 2, "model.lr: .*float.*abc"),
        (["--model=Nope"], 2, "model: .*Nope"),
        (["--model.init_args.lr=-1"], 1, "^lr must be positive and finite, got -1.0; "),
        (["--trainer.callbacks.probes=x"], 2, "trainer.callbacks.probes: .*int.*got x"),
        (["--trainer.callbacks.probes=0"], 1, "^probes must be at least 1, got 0"),
        (["--trainer.nonsense=3"], 2, "unrecognized arguments: --trainer.nonsense=3"),
        (["--trainer.callbacks=" + NOISY], 2, "did you mean 'noise_std'"),
        (["stray"], 2, "unrecognized arguments: stray"),
        (["--data.init_args.path=no.npz"], 1, "^There is no file no.npz"),
        (["--trainer.accelerator=tpu"], 1, "tpu|xla"),
        (["--ckpt_path=no.ckpt"], 1, "no.ckpt"),
        (["--config=no.yaml"], 2, "no.yaml"),
    ],
)
def test_mistakes_are_one_sentence(
    options: list[str],
    status: int,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path / "toy.yaml", toy(tmp_path, [MONITOR]))
    assert main(["fit", "--config", path, *options]) == status
    assert re.search(text, sentence(capsys, "leakwatch fit"))


@pytest.mark.parametrize("command", ["fit", "audit"])
def test_a_config_without_data(
    command: str, trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = toy(tmp_path, [MONITOR])
    del config["data"]
    options = [f"--ckpt={trained.checkpoint}"] if command == "audit" else []
    path = write(tmp_path / "toy.yaml", config)
    assert main([command, "--config", path, *options]) == 1
    message = sentence(capsys, f"leakwatch {command}")
    assert message.startswith("the config names no data")


def test_fit_without_anything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit"]) == 2
    assert "--config leakwatch:quickstart" in sentence(capsys, "leakwatch fit")


def test_a_config_of_the_package_is_found_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["configs"]) == 0
    names = capsys.readouterr().out.split()
    assert "leakwatch:quickstart" in names
    assert "leakwatch:attack/lavp_cosine" in names
    assert main(["configs", "leakwatch:quickstart"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["max_epochs"] == 10
    for options in (["--config=leakwatch:quickstat"], ["--config", "leakwatch:a"]):
        assert main(["fit", *options]) == 1
        assert sentence(capsys, "leakwatch fit").startswith("there is no config leakw")
    assert main(["configs", "lenet_relo"]) == 1
    assert "did you mean 'model/lenet_relu'? " in sentence(capsys, "leakwatch configs")


def test_debugging_shows_the_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAKWATCH_DEBUG", "1")
    with pytest.raises(FileNotFoundError, match="no directory"):
        main(["report", str(tmp_path / "none")])


def test_defects_are_not_disguised(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(argv: list[str]) -> int:
        return len(None)  # type: ignore[arg-type]

    monkeypatch.setattr("leakwatch.cli.report.report", defect)
    with pytest.raises(TypeError):
        main(["report", "x"])


def test_the_check_that_failed_speaks_through_wrappers() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        find_run("no/such/directory")
    wrapper = ValueError("many\nlines")
    wrapper.__cause__ = caught.value
    assert explain(wrapper) == "there is no directory no/such/directory."


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("x"), RuntimeError("x")])
def test_errors_of_others_keep_their_traceback(error: Exception) -> None:
    assert explain(error) is None
    assert explain(argparse.ArgumentError(None, "a\n  b")) is not None


def test_shorten_keeps_the_key_and_the_value() -> None:
    text = """Parser key "trainer.callbacks":
  Does not validate against any of the Union subtypes
  Subtypes: [list[Callback], <class 'NoneType'>]
  Errors:
    - Problem with given class_path 'leakwatch.callbacks.LeakageMonitor':
        Parser key "probes":

          - Expected a path but abc either not accessible or invalid
          - Does not validate against any of the Union subtypes
          Errors:
            - Expected a dot import path string: abc
            - Expected a <class 'int'>
          Given value type: <class 'str'>
          Given value: abc
  Given value: NestedArg(key='probes', val='abc')"""
    assert shorten(text) == (
        "trainer.callbacks.probes: leakwatch.callbacks.LeakageMonitor: "
        "Expected a <class 'int'>, got abc"
    )
    assert shorten("unrecognized arguments: foo") == "unrecognized arguments: foo"


# -- audit ---------------------------------------------------------------------------


def last_values(run: Path, epoch: int) -> dict[tuple[int | None, str], float]:
    return {
        (row.sample, row.quantity): row.value
        for row in RiskLedger.open(run).rows()
        if row.epoch == epoch and row.sample is not None
    }


def audit(
    trained: Run, tmp_path: Path, *options: str, ckpt: Path | None = None
) -> tuple[int, Path]:
    output = tmp_path / "audit"
    status = main(
        [
            "audit",
            f"--config={trained.config}",
            f"--ckpt={ckpt or trained.checkpoint}",
            f"--output={output}",
            *options,
        ]
    )
    return status, output


def test_audit_repeats_what_the_monitor_measured(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, output = audit(trained, tmp_path)
    assert status == 0
    epoch = read_checkpoint(trained.checkpoint).epoch
    found, expected = last_values(output, epoch), last_values(trained.ledger, epoch)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(
        list(found.values()), list(expected.values()), rtol=1e-6, atol=0, equal_nan=True
    )
    out = capsys.readouterr().out
    assert "best.ckpt: 4 samples of the train split" in out
    assert "i2f_range_psnr" in out
    assert f"report: {output / 'report.html'}" in out
    metadata = json.loads((output / "run.json").read_text())
    assert metadata["class_names"] == ["cat", "dog", "owl"]
    assert metadata["config"]["checkpoint"] == "best.ckpt"


@pytest.mark.parametrize("defended", [False, True])
def test_audit_measures_and_says_what_the_run_s_settings_state(
    tmp_path: Path, defended: bool
) -> None:
    # The last layer alone, in another precision, under a noise that nobody may add.
    settings = {"parameters": "*3*", "dtype": "float64", "noise_std": 0.1}
    monitor = {**MONITOR, "init_args": {**MONITOR["init_args"], **settings}}
    noise = {
        "class_path": "leakwatch.callbacks.GradientDefense",
        "init_args": {
            "defense": {
                "class_path": "leakwatch.defenses.GaussianNoise",
                "init_args": {
                    "budget": {
                        "class_path": "leakwatch.defenses.Budget",
                        "init_args": {"value": 0.1, "unit": "std"},
                    }
                },
            }
        },
    }
    callbacks = [CHECKPOINTS, monitor, *([noise] if defended else [])]
    config = write(tmp_path / "toy.yaml", toy(tmp_path, callbacks))
    assert main(["fit", "--config", config, "--trainer.max_epochs=1"]) == 0
    run = Run(tmp_path, config, "", 0)
    status, output = audit(run, tmp_path)
    assert status == 0
    epoch = read_checkpoint(run.checkpoint).epoch
    assert last_values(output, epoch) == pytest.approx(
        last_values(run.ledger, epoch), rel=1e-6, nan_ok=True
    )
    found, expected = (
        RiskLedger.open(path).read_metadata()["assumed"]
        for path in (output, run.ledger)
    )
    assert found == expected
    assert len(found) == (0 if defended else 1)


def test_audit_understands_the_saved_config(trained: Run, tmp_path: Path) -> None:
    saved = trained.ledger / "config.yaml"
    output = tmp_path / "audit"
    arguments = ["--config", str(saved), "--ckpt", str(trained.checkpoint)]
    assert main(["audit", *arguments, "--output", str(output)]) == 0
    epoch = read_checkpoint(trained.checkpoint).epoch
    assert last_values(output, epoch) == pytest.approx(
        last_values(trained.ledger, epoch), rel=1e-6, nan_ok=True
    )


def test_audit_never_overwrites(trained: Run, tmp_path: Path) -> None:
    for _ in range(2):
        assert audit(trained, tmp_path)[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"audit", "audit-1"}


def test_audit_goes_beside_the_checkpoint_by_default(
    trained: Run, tmp_path: Path
) -> None:
    copy = Path(shutil.copy(trained.checkpoint, tmp_path))
    assert main(["audit", "--config", trained.config, "--ckpt", str(copy)]) == 0
    assert (tmp_path / "leakwatch-audit/report.html").is_file()


def test_audit_of_plain_weights(trained: Run, tmp_path: Path) -> None:
    weights = read_checkpoint(trained.checkpoint).weights
    plain = tmp_path / "weights.pt"
    torch.save(dict(weights), plain)
    status, output = audit(trained, tmp_path, ckpt=plain)
    assert status == 0
    # Without the monitor's state the same seed draws the same samples.
    epoch = read_checkpoint(trained.checkpoint).epoch
    expected = last_values(trained.ledger, epoch)
    found = last_values(output, 0)
    assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_audit_of_validation_samples(trained: Run, tmp_path: Path) -> None:
    status, output = audit(trained, tmp_path, "--split=val", "--probes=6")
    assert status == 0
    samples = {row.sample for row in RiskLedger.open(output).rows()} - {None}
    assert len(samples) == 6
    assert max(s for s in samples if s is not None) < 18  # 30 % of 60
    pixels = RiskLedger.open(output).read_probes()
    watched = RiskLedger.open(trained.ledger).read_probes()
    assert pixels is not None
    assert watched is not None
    rows = {picture.tobytes() for picture in watched["pixels"]}
    assert not rows & {picture.tobytes() for picture in pixels["pixels"]}


def test_audit_overrides_the_config(trained: Run, tmp_path: Path) -> None:
    status, output = audit(
        trained, tmp_path, "--probes=2", "--trainer.callbacks.scores=[lavp_l2_max]"
    )
    assert status == 0
    rows = [row for row in RiskLedger.open(output).rows() if row.sample is not None]
    assert len({row.sample for row in rows}) == 2
    assert {row.quantity for row in rows} == {"lavp_l2_max", "grad_norm", "loss"}


def test_audit_without_a_monitor_uses_its_defaults(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load(Path(trained.config).read_text())
    config["trainer"]["callbacks"] = [CHECKPOINTS]
    path = write(tmp_path / "bare.yaml", config)
    arguments = ["--config", path, "--ckpt", str(trained.checkpoint)]
    assert main(["audit", *arguments, "--output", str(tmp_path / "a")]) == 0
    assert "no LeakageMonitor; its default settings" in capsys.readouterr().out
    samples = {row.sample for row in RiskLedger.open(tmp_path / "a").rows()} - {None}
    assert len(samples) == 32


def test_audit_says_when_the_samples_are_others(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = audit(trained, tmp_path, "--data.init_args.seed=5")
    assert status == 0
    assert "not those that the run watched" in capsys.readouterr().out


def test_audit_of_another_architecture(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lenet = ["--model.init_args.model=lenet", "--model.init_args.model_args=null"]
    assert audit(trained, tmp_path, *lenet)[0] == 1
    message = sentence(capsys, "leakwatch audit")
    assert "the checkpoint lacks model.features.0.weight" in message
    assert "LitClassifier of LeNet: " in message
    assert "the model has no model.layers.1.weight" in message
    assert not (tmp_path / "audit").exists()


def test_audit_names_shapes_that_differ(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option = '--model.init_args.model_args={"hidden_sizes": [7]}'
    assert audit(trained, tmp_path, option)[0] == 1
    message = sentence(capsys, "leakwatch audit")
    assert "LitClassifier of MLP" in message
    assert "model.layers.1.weight (6, 25) instead of (7, 25)" in message
    assert not (tmp_path / "audit").exists()


def test_weights_are_loaded_all_or_none() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    given = {name: value + 1 for name, value in before.items()}
    given["extra"] = given.pop("1.bias")
    checkpoint = Checkpoint(Path("x.ckpt"), given, 0, 0, {})
    with pytest.raises(ValueError, match=r"lacks 1\.bias; .*has no extra\."):
        load_weights(net, checkpoint)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


def test_long_lists_of_differences_are_cut() -> None:
    net = nn.Sequential(*(nn.Linear(1, 1) for _ in range(5)))
    checkpoint = Checkpoint(Path("x"), {"w": torch.ones(1)}, 0, 0, {})
    with pytest.raises(ValueError, match=r"0\.weight, .* and 6 more"):
        load_weights(net, checkpoint)


class Custom:
    """Something that is not a tensor."""


def test_checkpoints_with_objects_need_trust(trained: Run, tmp_path: Path) -> None:
    content = torch.load(trained.checkpoint, weights_only=True)
    path = tmp_path / "objects.ckpt"
    torch.save({**content, "object": Custom()}, path)
    with pytest.raises(ValueError, match="add --trust"):
        read_checkpoint(path)
    found = read_checkpoint(path, trust=True)
    assert found.weights.keys() == content["state_dict"].keys()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"text, not a checkpoint", "is not a PyTorch checkpoint"),
        (b"", "is not a PyTorch checkpoint"),
        ([1, 2], "holds a list"),
        ({"epoch": 3}, "has no weights"),
        ({}, "has no weights"),
    ],
)
def test_files_that_are_no_checkpoint(
    content: Any,
    text: str,
    trained: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "x.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    assert audit(trained, tmp_path, ckpt=path)[0] == 1
    assert text in sentence(capsys, "leakwatch audit")


def test_missing_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--ckpt", "no.ckpt"]) == 1
    assert sentence(capsys, "leakwatch audit") == "there is no checkpoint no.ckpt."


def test_unusable_device(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(trained, tmp_path, "--device=abacus")[0] == 1
    assert "--device abacus can't be used" in sentence(capsys, "leakwatch audit")


@pytest.mark.parametrize(
    ("ready", "processed", "last", "completed"),
    [
        (2, 1, True, 2),  # in validation after the second epoch
        (2, 2, True, 2),  # at its end
        (2, 1, False, 1),  # within it
        (2, 2, False, 2),
    ],
)
def test_completed_epochs(
    ready: int, processed: int, last: bool, completed: int, tmp_path: Path
) -> None:
    progress = {"current": {"ready": ready, "processed": processed}}
    loop = {
        "epoch_progress": progress,
        "epoch_loop.batch_progress": {"is_last_batch": last},
    }
    path = tmp_path / "x.ckpt"
    content = {
        "state_dict": {"w": torch.ones(1)},
        "epoch": 99,
        "global_step": 7,
        "loops": {"fit_loop": loop},
    }
    torch.save(content, path)
    found = read_checkpoint(path)
    assert (found.epoch, found.step, found.callbacks) == (completed, 7, {})
    torch.save({**content, "loops": {}}, path)
    assert read_checkpoint(path).epoch == 99


def test_checkpoint_epoch_of_a_real_run(trained: Run) -> None:
    found = read_checkpoint(trained.checkpoint)
    steps = {r.epoch: r.step for r in RiskLedger.open(trained.ledger).rows()}
    assert found.step == steps[found.epoch] > 0


# -- report --------------------------------------------------------------------------


def test_report_from_run_log_or_parent(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained.ledger, tmp_path / "logs/version_0/leakwatch-run")
    report = tmp_path / "logs/version_0/leakwatch-run/report.html"
    for place in ("logs/version_0/leakwatch-run", "logs/version_0", "logs", "."):
        report.unlink()
        assert main(["report", str(tmp_path / place)]) == 0
        assert Path(capsys.readouterr().out.strip()) == report
        assert report.is_file()


def test_report_of_several_runs_lists_them(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        shutil.copytree(trained.ledger, tmp_path / name)
    assert main(["report", str(tmp_path)]) == 1
    message = sentence(capsys, "leakwatch report")
    assert "holds 2 recorded runs" in message
    assert str(tmp_path / "a") in message


def test_report_of_runs_that_share_a_log_directory_takes_none_silently(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("leakwatch-run", "leakwatch-audit"):
        shutil.copytree(trained.ledger, tmp_path / name)
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert Path(said.out.strip()).parent == tmp_path / "leakwatch-run"
    also = f"{tmp_path / 'leakwatch-run'}; also recorded here: "
    assert said.err == f"taken: {also}{tmp_path / 'leakwatch-audit'}\n"
    assert main(["show", str(tmp_path)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    run, audit = tmp_path / "leakwatch-run", tmp_path / "leakwatch-audit"
    assert first == f"shown: {run}; also recorded here: {audit}"
    assert main(["show", str(run)]) == 0
    assert "also recorded here" not in capsys.readouterr().out
    shutil.copytree(trained.ledger, tmp_path / "leakwatch-run-1")
    assert main(["report", str(tmp_path)]) == 1
    message = sentence(capsys, "leakwatch report")
    assert "holds 2 recorded runs" in message
    assert str(tmp_path / "leakwatch-run-1") in message


@pytest.mark.parametrize("exists", [True, False])
def test_report_of_nothing(
    exists: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path if exists else tmp_path / "none"
    assert main(["report", str(place)]) == 1
    expected = "no recorded run in" if exists else "there is no directory"
    assert expected in sentence(capsys, "leakwatch report")


@pytest.mark.parametrize(
    "command", ["show", "check", "report", "compare", "export", "audit", "attack"]
)
def test_a_file_is_no_run(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "metrics.csv"
    file.touch()
    options = {"check": ["--max-psnr=25"], "export": ["values.csv"]}.get(command, [])
    again = ["--from"] if command in ("audit", "attack") else []
    assert main([command, *again, str(file), *options]) == 2
    assert sentence(capsys, f"leakwatch {command}") == (
        f"{file} is a file; expected the folder that holds run.json, such as "
        "lightning_logs/version_0/leakwatch-run, or the folder above it."
    )


# -- check ---------------------------------------------------------------------------


def test_check_says_by_its_exit_status_what_holds(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(trained.ledger)
    for options, status in (
        (["--max-psnr", "1000"], 0),
        (["--max-psnr=-99", "--share=0.99"], 3),
        (["--at-most", "leakwatch/seconds=1e9"], 0),
        (["--at-least", "leakwatch/seconds=1e9"], 3),
        (["--at-most", "leakwatch/nothing=1"], 2),
        ([], 1),
        (["--share=2"], 2),
        (["--at-most", "leakwatch/seconds"], 2),
    ):
        assert main(["check", run, *options]) == status
    capsys.readouterr()
    # Every probe step counts, or the last one.
    for options, steps in ((["--last"], 1), ([], 3)):
        assert main(["check", run, "--max-psnr=-99", *options]) == 3
        broken = capsys.readouterr().err.splitlines()
        assert len(broken) == steps
        assert broken[-1].startswith("after epoch 2: 4 of 4 samples are above -99 dB")


def test_a_run_without_values_does_not_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RiskLedger(tmp_path).write_metadata({})
    assert main(["check", str(tmp_path), "--max-psnr", "25"]) == 3
    assert capsys.readouterr().err == "nothing was measured\n"


# -- show and compare ---------------------------------------------------------------


def test_show_prints_the_table_and_conclusions(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(trained.folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(run_table(trained.ledger))
    assert "\nWho is worst off, and is it rising?\n  Sample #" in out
    table = tmp_path / "values.csv"
    assert main(["export", str(trained.folder), str(table)]) == 0
    rows = RiskLedger.open(trained.ledger).rows()
    assert len(table.read_text().splitlines()) == len(rows) + 1
    assert main(["export", str(trained.folder), str(tmp_path / "no/x.csv")]) == 1
    assert "there is no directory" in sentence(capsys, "leakwatch export")
    assert main(["export", str(trained.folder), "values.xls"]) == 1
    assert "must end in .csv or .parquet" in sentence(capsys, "leakwatch export")
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow", exc_type=ImportError)  # not with every NumPy
    table = tmp_path / "values.parquet"
    assert main(["export", str(trained.folder), str(table)]) == 0
    assert len(pandas.read_parquet(table)) == len(rows)


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        (
            {"config": {"noise_std": 0.02}},
            "Predictions hold for noise_std=0.02, Gaussian noise of standard deviation "
            "0.02 on every entry of the shared gradient; the attacker knows mean and "
            "spread of the pixels.",
        ),
        (
            {"message": "update", "config": {"prior": "the statistics of photographs"}},
            "Predictions assume that what one gradient does not explain of an update "
            "is Gaussian noise; the attacker knows the statistics of photographs.",
        ),
        ({}, "The record does not name the noise_std of its predictions; the attacker"),
    ],
)
def test_show_says_for_whom_the_numbers_hold(
    metadata: dict[str, Any],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ledger = RiskLedger(tmp_path / "run")
    ledger.append([Row(0, 0, 5, 0, "i2f_bayes_psnr", 20.0)])
    ledger.write_metadata(metadata)
    assert main(["show", str(ledger.directory)]) == 0
    assert text in " ".join(capsys.readouterr().out.split())
    assert main(["check", str(ledger.directory), "--max-psnr=25"]) == 0
    assert f"  {text}" in capsys.readouterr().out


def test_compare_puts_the_most_exposed_and_the_unknown_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("low", 12.0), ("high", 30.0), ("none", math.nan)):
        status = "failed: x" if math.isnan(value) else "ok"
        ledger = RiskLedger(tmp_path / name)
        epoch = int(name == "high")
        ledger.append([Row(epoch, epoch, 5, 0, "i2f_psnr", value, status)])
        ledger.write_metadata({"config": {"noise_std": 0.1 * (name == "low")}})
    runs = [str(tmp_path / name) for name in ("low", "high", "none")]
    assert main(["compare", *runs]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert [Path(line.split()[0]).name for line in lines[1:4]] == [
        "none",
        "high",
        "low",
    ]
    assert "30.0 dB" in lines[2]
    assert "not known" in lines[1]
    assert lines[-1] == "read with care: these runs differ in epoch, noise_std"
    page = tmp_path / "runs.html"
    assert main(["compare", *runs, "--html", str(page)]) == 0
    assert capsys.readouterr().out.endswith(f"page: {page}\n")
    assert "high exposes most: 30.0 dB" in page.read_text("utf-8")
    assert main(["compare", runs[0], "--html", str(page)]) == 1
    assert "takes two runs or more, got 1" in sentence(capsys, "leakwatch compare")


# -- tables --------------------------------------------------------------------------


def test_values_that_mean_nothing_are_not_shown(tmp_path: Path) -> None:
    ledger = RiskLedger(tmp_path)
    ledger.append(
        [
            Row(0, 0, 5, 0, "i2f_psnr", 20.0),
            Row(0, 0, 6, 1, "i2f_psnr", 31.0),
            Row(0, 0, 7, 1, "i2f_psnr", 99.0, "unresolved: below the floor"),
        ]
    )
    ledger.append([Row(1, 9, 5, 0, "i2f_psnr", math.nan, "failed: out of memory")])
    text = run_table(tmp_path)
    assert "99" not in text
    lines = [line.split() for line in text.splitlines()]
    assert ["0", "25.5", "31.0", "6", "(class", "1)"] in lines
    assert ["1", "–", "–", "–"] in lines
    assert "epoch 0: 1 unresolved of 3" in text
    assert "epoch 1: 1 failed of 1" in text


def test_failed_attacks_are_counted_and_give_no_number(tmp_path: Path) -> None:
    rows = [Row(1, 9, i, i, "i2f_psnr", 20.0 + i) for i in range(3)]
    rows += attacked("near", [30.0, 7.7, 20.0], [True, False, True])
    rows += attacked("random", [7.7, 7.7, 7.7], [False] * 3)
    ledger = RiskLedger(tmp_path)
    ledger.append([Row(1, 10, *rest(r)) for r in rows])
    text = run_table(tmp_path)
    assert text.startswith("PSNR of attacks on a shared gradient, dB")
    assert "7.7" not in text
    line = next(line.split() for line in text.splitlines() if "(class" in line)
    assert line[-2:] == ["25.0", "–"]
    assert "the near attack was inconclusive on 1 of 3 samples, which shows no" in text
    assert "epoch 1: the random attack was inconclusive on 3 of 3 samples" in text
    ledger.write_metadata({"message": "update"})
    assert "attacks on a shared weight update" in run_table(tmp_path)


def rest(row: Row) -> tuple[int | None, int | None, str, float, str]:
    """All but the moment."""
    return row.sample, row.label, row.quantity, row.value, row.status


def test_runs_without_a_predicted_psnr(tmp_path: Path) -> None:
    ledger = RiskLedger(tmp_path)
    ledger.append([Row(0, 0, 5, None, "lavp_l2_max", 1.0)])
    ledger.append([Row(1, 9, 5, None, "lavp_l2_max", 2.5)])
    assert run_table(tmp_path) == score_table(tmp_path)
    assert score_table(tmp_path).splitlines()[1].split() == [
        "lavp_l2_max",
        "2.50",
        "–",
        "–",
    ]


def test_a_run_without_values(tmp_path: Path) -> None:
    RiskLedger(tmp_path).write_metadata({})
    assert run_table(tmp_path) == "Nothing has been recorded."


def test_shorten_shows_no_class_of_jsonargparse() -> None:
    text = "Key \"lr\" is no number, got NestedArg(key='lr', val='abc')"
    assert shorten(text) == "Key \"lr\" is no number, got lr='abc'"
