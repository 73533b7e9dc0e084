from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from leakwatch.cli import main
from leakwatch.reproduction import Experiment, names


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--cells", "0"], "--cells must be at least 1, got 0"),
        (["--device", "cudaa"], "--device cudaa can't be used"),
        (["--output", "taken/below"], "--output must be a folder, and taken is a file"),
    ],
)
def test_what_cannot_work_is_said_before_data_are_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("")
    assert main(["reproduce", "lavp-table-1", *options]) == 1
    err = capsys.readouterr().err
    assert said in err
    assert "--data mnist_sample" not in err


def test_list_names_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in names())


def test_an_experiment_of_ones_own_runs_and_is_listed_as_done(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    attack = {"preset": "lavp-l2", "steps": 2, "restarts": 1}
    small = {
        "rows": [{"data": "mnist", "attack": "L2", "beside": "C-10+L2"}],
        "attacks": {"L2": attack},
        "networks": {"linear": {"model": "linear"}},
        "seeds": 1,
        "images": 5,
        "scores": ["grad_norm"],
        "panels": [["MNIST+L2", "grad_norm"]],
    }
    content = {
        "paper": "lavp",
        "item": "Table 1",
        "title": "t",
        "claim": "c",
        "kind": "correlation",
        "published": "lavp-table-1",
        "scales": {"small": small},
    }
    Path("mine.yaml").write_text(yaml.safe_dump(content))
    assert main(["reproduce", "mine.yaml"]) == 1
    assert "--data mnist_sample" in capsys.readouterr().err
    assert main(["reproduce", "mine.yaml", "--data", "mnist_sample"]) == 0
    said = capsys.readouterr().out
    assert "**digits+L2**" in said
    assert "*paper: C-10+L2*" in said
    where = tmp_path / "leakwatch-reproduction" / "mine-small-mnist_sample"
    assert {p.name for p in where.iterdir()} == {
        "result.json",
        "table.md",
        "figure.png",
    }
    assert (
        main(["reproduce", "mine.yaml", "--data", "mnist_sample", "--cells", "1"]) == 0
    )
    assert "hours of one process" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (["lavp-tabel-1"], 1, "did you mean 'lavp-table-1'"),
        (["lavp-table-1", "--data", "mnits"], 1, "did you mean 'mnist'"),
        (["lavp-table-1", "--scale", "big"], 2, "invalid choice: 'big'"),
        (["lavp-table-1", "--cells", "0"], 1, "--cells must be at least 1"),
        ([], 2, "leakwatch reproduce list"),
    ],
)
def test_a_mistake_is_one_sentence(
    argv: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *argv]) == status
    assert said in capsys.readouterr().err


def test_missing_data_does_not_stop_the_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    ran: list[str] = []

    def reproduce(experiment: Experiment, **more: object) -> None:
        ran.append(experiment.name)
        if experiment.name == "lavp-table-2":
            raise ZeroDivisionError("a bug")
        raise FileNotFoundError(f"{experiment.name} lacks data")

    monkeypatch.setattr("leakwatch.reproduction.reproduce", reproduce)
    assert main(["reproduce", "all"]) == 1
    assert ran == names()
    said = capsys.readouterr()
    assert "\nlavp-table-1 lacks data" in said.out
    assert "\nZeroDivisionError: lavp-table-2: a bug" in said.out
    assert f"{len(ran)} of {len(ran)} experiments were not finished" in said.err
