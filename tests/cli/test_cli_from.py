"""``--from RUN`` repeats what a command recorded, from ``run.json`` alone."""

from __future__ import annotations

import inspect
import json
import math
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import CHECKPOINTS, MONITOR, sentence, toy, write

from leakwatch.attacks import FirstOrder, GaussNewton, Priors
from leakwatch.callbacks import InversionAudit, LeakageMonitor, UpdateAudit
from leakwatch.callbacks._audit.plan import Audit, UpdatePlan
from leakwatch.cli import main
from leakwatch.reporting import RiskLedger
from leakwatch.scores import Scoring

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
)

AUDIT: dict[str, Any] = {
    "class_path": "leakwatch.callbacks.InversionAudit",
    "init_args": {
        "probes": 3,
        "attack": "lavp-cosine",
        "steps": 7,
        "every_n_epochs": 2,
        "restarts": 2,
        "scores": ["bayes"],
        "noise_std": 2e-5,
        "verbose": False,
        "name": "second",
    },
}
FIRST = {"name": "first", "worst_case": None, "steps": 1}
OTHER = {**AUDIT, "init_args": {**AUDIT["init_args"], **FIRST}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("from")
    last = {**CHECKPOINTS, "init_args": {"filename": "best"}}
    callbacks = [last, MONITOR, OTHER, AUDIT]
    config = write(folder / "toy.yaml", toy(folder, callbacks))
    assert main(["fit", "--config", config]) == 0
    (folder / "toy.yaml").unlink()
    for saved in folder.rglob("config.yaml"):
        saved.unlink()  # run.json has all of it
    return folder


def values(folder: Path) -> dict[tuple[Any, ...], tuple[str, str]]:
    return {
        (row.epoch, row.sample, row.quantity): (repr(row.value), row.status)
        for row in RiskLedger.open(folder).rows()
        if row.quantity not in ("seconds", "time_fraction")
    }


def test_an_attack_from_a_record_of_training_and_from_its_own(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained / "logs/version_0/second-run"
    checkpoint = tmp_path / "kept.ckpt"
    shutil.copy(trained / "logs/version_0/checkpoints/best.ckpt", checkpoint)
    first, again = tmp_path / "first", tmp_path / "again"
    told = ["--ckpt", str(checkpoint), "--output", str(first)]
    assert main(["attack", "--from", str(run), *told]) == 0
    out = capsys.readouterr().out
    found, before = values(first), values(run)
    assert found == {key: before[key] for key in found}
    assert len({key[1] for key in found}) == 4  # three samples, and all together
    assert f"{len(found)} of {len(found)} values are equal to those of {run}" in out
    # The record of a command names its checkpoint: nothing else is needed.
    assert main(["attack", f"--from={first}", f"--output={again}"]) == 0
    assert values(again) == found
    assert f"values are equal to those of {first}" in capsys.readouterr().out

    state = torch.load(checkpoint, weights_only=True)
    next(iter(state["state_dict"].values())).add_(1.0)
    torch.save(state, checkpoint)
    assert main(["attack", f"--from={first}"]) == 1
    assert "is not the file that" in sentence(capsys, "leakwatch attack")
    # Another file is another question, and the answer says so.
    other = shutil.copy(checkpoint, tmp_path / "other.ckpt")
    told = [f"--ckpt={other}", f"--output={tmp_path / 'other'}"]
    assert main(["attack", f"--from={first}", *told]) == 0
    assert "furthest apart is" in capsys.readouterr().out


def test_a_record_of_a_monitor_alone_is_attacked_under_its_assumptions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {**MONITOR["init_args"], "probes": 1, "noise_std": 0.3, "seed": 5}
    last = {**CHECKPOINTS, "init_args": {"filename": "best"}}
    config = toy(tmp_path, [last, {**MONITOR, "init_args": given}])
    assert main(["fit", "--config", write(tmp_path / "toy.yaml", config)]) == 0
    (run,) = (file.parent for file in tmp_path.rglob("run.json"))
    checkpoint = next(tmp_path.rglob("best.ckpt"))
    capsys.readouterr()
    told = ["--ckpt", str(checkpoint), "--output", str(tmp_path / "out")]
    assert main(["attack", "--from", str(run), *told]) == 0
    assert "noise (noise_std=0.3)" in capsys.readouterr().out
    made = RiskLedger.open(tmp_path / "out").read_metadata()
    assert made["config"]["noise_std"] == 0.3
    before, after = values(run), values(tmp_path / "out")
    same = {key for key in before.keys() & after.keys() if "i2f" in key[2]}
    assert same
    assert {key: after[key] for key in same} == {key: before[key] for key in same}


def test_scores_of_initial_weights_and_of_another_split(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, checkpoint = trained / "logs/version_0/leakwatch-run", tmp_path / "kept.ckpt"
    shutil.copy(trained / "logs/version_0/checkpoints/best.ckpt", checkpoint)
    assert main(["audit", f"--from={run}"]) == 1
    assert "--ckpt names a checkpoint" in sentence(capsys, "leakwatch audit")
    first, again = tmp_path / "first", tmp_path / "again"
    told = [f"--ckpt={checkpoint}", f"--output={first}", "--split=val"]
    assert main(["audit", f"--from={run}", *told]) == 0
    assert main(["audit", f"--from={first}", f"--output={again}"]) == 0
    assert values(again) == values(first)
    assert RiskLedger.open(again).read_metadata()["subject"]["split"] == "val"


def test_records_that_do_not_say_enough(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(trained / "logs/version_0/leakwatch-run", tmp_path / "run")
    for subject in (None, 3, {"config": [1]}):
        content = RiskLedger(run).read_metadata() | {"subject": subject}
        RiskLedger(run).write_metadata(content)
        assert main(["attack", f"--from={run}"]) == 1
        said = sentence(capsys, "leakwatch attack")
        assert "does not say how to build its network" in said
        assert "only runs of `leakwatch fit`" in said
    assert main(["attack", f"--from={tmp_path / 'none'}"]) == 1
    assert "there is no directory" in sentence(capsys, "leakwatch attack")


def names_in(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(names_in, value.values()))
    return set().union(*map(names_in, value)) if isinstance(value, list) else set()


def test_all_that_changes_a_number_is_recorded(trained: Path) -> None:
    """Whole signatures: an argument that is added and not recorded fails here."""
    metadata = json.loads((trained / "logs/version_0/second-run/run.json").read_text())
    arguments = metadata["arguments"]
    attack = arguments["audit"]["attacks"]["random"]
    assert attack["priors"]["tv"] == 1e-6
    assert attack["steps"] == 7
    assert arguments["settings"]["noise_std"] == 2e-5
    names = names_in(arguments)
    for kind in (FirstOrder, GaussNewton, Priors, Audit, Scoring):
        expected = {f.name for f in fields(kind)} - {"progress"}
        assert expected <= names, kind
    told = {"worst_case": "near", "attack": "random"}
    # What only places and shows the record.
    shown = {"name", "directory", "report", "log", "log_ledger", "log_images"}
    shown |= {"verbose", "live"}
    own = {"layers", "budget"}
    assert own <= LeakageMonitor(layers=True, precision="exact").arguments().keys()
    for callback in (InversionAudit, LeakageMonitor):
        wanted = inspect.signature(callback).parameters.keys() - shown - own
        assert {told.get(name, name) for name in wanted} <= names, callback
    audit = UpdateAudit(clients=2)
    wanted = {f.name for f in fields(UpdatePlan)}
    assert wanted <= vars(audit.arguments()["plan"]).keys()
    assert {"clients", "plan", "scoring"} <= audit.arguments().keys()
    assert math.isfinite(metadata["computed"]["threads"])
