"""Studies of data that the config's training prepares in hooks."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import hooked
import pytest
import torch
from hooked import MEAN, STD, Normalizing, Shrinking
from test_cli import toy, write

from leakwatch.cli import main
from leakwatch.cli.trade_training import accuracy_on
from leakwatch.datamodules import ArrayDataModule
from leakwatch.studies import compare_initializations, trade_off

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:You have overridden `on_after_batch_transfer` in `LightningModule`",
)

COMPARE: dict[str, Any] = {
    "schemes": ["kaiming"], "seeds": [3], "samples": 2, "epochs": 1,
    "attacks": ["gs"], "steps": 3, "repeats": 1,
}  # fmt: skip
TRADE: dict[str, Any] = {
    "defenses": ["gaussian", "eigen-waterfill"], "budgets": [0.5], "samples": 2,
    "steps": 3, "accuracy_on": "val", "start": "near", "wandb": "off",
}  # fmt: skip


# Eigenvectors of equal eigenvalues, which eigen- defenses draw along, are not told by
# inputs that are equal to rounding.
SMOOTH: dict[str, Any] = {"defenses": ["gaussian", "pruning"], "mixup": [0.6]}


def config(folder: Path, module: type, *, raw: bool, **more: Any) -> str:
    stated = toy(folder, more.pop("callbacks", []))
    stated["model"] = {"class_path": f"hooked.{module.__name__}"}
    data = {"normalize": False} if raw else {"mean": [MEAN], "std": [STD]}
    stated["data"]["init_args"] |= data
    stated["trainer"] |= {"max_epochs": 2, "logger": False}
    return write(folder / f"{module.__name__}.yaml", stated | more)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def assert_same(found: list[dict[str, str]], expected: list[dict[str, str]]) -> None:
    """Equal up to what rounding of the inputs makes of it."""
    assert len(found) == len(expected) > 1
    for one, other in zip(found, expected, strict=True):
        for key, value in one.items():
            try:
                number = float(value)
            except ValueError:
                assert value == other[key]
                continue
            if "seconds" not in key and not math.isnan(number):
                assert number == pytest.approx(float(other[key]), rel=2e-3), key


def watched(command: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each study that is run from now on is given."""
    calls: list[dict[str, Any]] = []
    where, study = {
        "compare-inits": ("leakwatch.cli.compare_inits", compare_initializations),
        "trade-off": ("leakwatch.cli.trade_off", trade_off),
    }[command]

    def noted(module: Any, x: Any, *args: Any, **options: Any) -> Any:
        calls.append({**options, "x": x})
        return study(module, x, *args, **options)

    monkeypatch.setattr(f"{where}.{study.__name__}", noted)
    return calls


@pytest.mark.parametrize(
    ("command", "asked", "file"),
    [
        ("compare-inits", {"compare": COMPARE}, "values.csv"),
        ("trade-off", {"trade_off": TRADE | SMOOTH}, "trade_off.csv"),
    ],
)
def test_a_hook_that_normalises_is_a_normalisation(
    command: str,
    asked: dict[str, Any],
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values are those of the same training of data that are normalised before."""
    given = watched(command, monkeypatch)
    found = []
    for module, raw in ((Normalizing, True), (hooked.Plain, False)):
        stated = config(tmp_path, module, raw=raw, **asked)
        out = tmp_path / module.__name__
        assert main([command, "--config", stated, "--output", str(out)]) == 0
        found.append(table(out / file))
    assert_same(*found)
    one, other = given
    torch.testing.assert_close(one["x"], other["x"], rtol=1e-5, atol=1e-5)
    for name in ("mean", "std", "data_range"):
        assert one[name] == pytest.approx(other[name], rel=1e-6)
    assert one["prepare"] is None
    if command == "trade-off":
        assert {row["failed"] for row in found[0]} == {"0"}
        assert len({row["accuracy"] for row in found[0]}) > 1


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        ("compare-inits", {"compare": COMPARE}),
        ("trade-off", {"trade_off": TRADE | {"defenses": ["gaussian"]}}),
    ],
)
def test_what_else_hooks_do_is_done_to_samples(
    command: str,
    asked: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = watched(command, monkeypatch)
    stated, out = config(tmp_path, Shrinking, raw=True, **asked), tmp_path / "out"
    assert main([command, "--config", stated, "--output", str(out)]) == 0
    [given] = calls
    assert given["x"].shape == (2, 1, 5, 5)
    assert torch.equal(given["prepare"](given["x"]), given["x"][..., 1:-1, 1:-1])
    rows = table(out / ("trade_off.csv" if command == "trade-off" else "values.csv"))
    assert {row.get("failed", "0") for row in rows} == {"0"}


def monitored(**init: Any) -> list[Any]:
    path = "leakwatch.callbacks.LeakageMonitor"
    return [{"class_path": path, "init_args": init}]


@pytest.mark.parametrize(
    ("command", "module", "changed", "sentence"),
    [
        ("compare-inits", "Brightening", {}, "on_after_batch_transfer draws at rando"),
        ("trade-off", "Brightening", {}, "on_after_batch_transfer draws at random"),
        ("compare-inits", "Learning", {}, "what prepares batches uses weights"),
        ("trade-off", "Shrinking", {}, "eigen-waterfill would protect inputs as"),
        (
            "trade-off",
            "Shrinking",
            {"trade_off": TRADE | {"defenses": [], "mixup": [0.6]}},
            "mixup would protect inputs as training prepares them",
        ),
        (
            "trade-off",
            "Plain",
            {"callbacks": monitored(prepare="hooked.normalized")},
            "which neither defenses nor the measurement of accuracy can repeat",
        ),
    ],
)
def test_what_can_not_be_right_is_refused(
    command: str,
    module: str,
    changed: dict[str, Any],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = {"compare": COMPARE} if command == "compare-inits" else {"trade_off": TRADE}
    stated = config(tmp_path, getattr(hooked, module), raw=True, **(asked | changed))
    out = tmp_path / "out"
    assert main([command, "--config", stated, "--output", str(out)]) == 1
    said = capsys.readouterr().err
    assert sentence in said
    assert "transform" in said
    assert not out.exists()


def test_accuracy_is_of_prepared_batches(tmp_path: Path) -> None:
    data = ArrayDataModule(**toy(tmp_path, [])["data"]["init_args"], normalize=False)
    data.setup("fit")
    torch.manual_seed(1)
    net = Normalizing()
    for p in net.parameters():
        torch.nn.init.normal_(p)
    x, y = (torch.cat(parts) for parts in zip(*data.val_dataloader(), strict=True))
    as_they_are, prepared = (
        float((net(each).argmax(1) == y).double().mean())
        for each in (x, (x - MEAN) / STD)
    )
    assert accuracy_on(data, "val")(net) == pytest.approx(prepared)
    assert prepared != as_they_are
