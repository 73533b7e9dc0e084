"""A mistake of the user's, or a damaged file, gets a sentence of ours."""

from __future__ import annotations

import inspect
import io
import json
import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import leakwatch
from leakwatch import ProbeSet
from leakwatch.callbacks import (
    GradientDefense,
    InversionAudit,
    LeakageMonitor,
    UpdateAudit,
)
from leakwatch.callbacks._probing.state import Progress
from leakwatch.cli import main
from leakwatch.cli.checkpoint import read_checkpoint
from leakwatch.cli.main import explain
from leakwatch.defenses import DPSGD, Budget, GaussianNoise
from leakwatch.reporting import RiskLedger, Row, write_report
from leakwatch.reporting.ledger.storage import encode_arrays

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

few = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
many = settings(few, max_examples=120)

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.sampled_from([0, -1, 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.floats()), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from([object(), object, len, torch.ones(2), np.ones(2), nn.Identity()]),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


def says(function: Callable[[], object]) -> None:
    """It works, or raises an error that our own code raised, in one sentence."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function()
        return
    except (TypeError, ValueError) as error:
        raised = error
    assert explain(raised) is not None, repr(raised)


KINDS: dict[Any, dict[str, Any]] = {
    LeakageMonitor: {},
    InversionAudit: {},
    UpdateAudit: {"clients": 2},
    GradientDefense: {"defense": GaussianNoise(Budget(0.1))},
    Budget: {"value": 1.0},
    DPSGD: {"clip": 1.0, "noise_multiplier": 1.0},
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@many
@given(st.data())
def test_constructors(kind: Any, data: st.DataObject) -> None:
    names = [n for n in inspect.signature(kind).parameters if n != "directory"]
    name = data.draw(st.sampled_from(names))
    arguments = KINDS[kind] | {name: data.draw(JUNK)}
    says(lambda: kind(**arguments))


X, Y = torch.rand(2, 1, 3, 3), torch.tensor([0, 1])
NET = nn.Sequential(nn.Flatten(), nn.Linear(9, 3))


@few
@given(st.data())
def test_scores_attacks_and_probes(data: st.DataObject) -> None:
    function: Any = data.draw(
        st.sampled_from([leakwatch.score, leakwatch.attack, ProbeSet.from_tensors])
    )
    own = {"scores": ["norms"]} if function is leakwatch.score else {}
    if function is leakwatch.attack:
        own = {"preset": "lavp-l2", "steps": 1, "restarts": 1}
    given_by_name = {"module", "dtype", "device"}
    given_by_name.add("overrides")
    names = list(inspect.signature(function).parameters)
    name = data.draw(st.sampled_from([n for n in names if n not in given_by_name]))
    arguments = {"x": X, "y": Y, **own}
    if function != ProbeSet.from_tensors:
        arguments["module"] = NET
    value = data.draw(JUNK)
    assume(not callable(value))  # a function's mistakes are its own
    # As many steps as that would not be a mistake, but a long wait.
    if name in ("steps", "restarts", "products", "influence_steps", "images"):
        value = value if not isinstance(value, int) else min(value, 3)
    says(lambda: function(**(arguments | {name: value})))


def quietly(function: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function()


def read_all(folder: Path) -> None:
    ledger = RiskLedger.open(folder)
    ledger.rows()
    ledger.spectra()
    ledger.attacks()
    ledger.read_probes()


def recorded(folder: Path) -> None:
    ledger = RiskLedger(folder, run="r")
    ledger.write_metadata({"config": {"noise_std": 0.1}, "class_names": ["a", "b"]})
    ledger.append(
        [Row(0, 0, s, s, "i2f_psnr", 20.0 + s) for s in range(2)],
        {"eigenvalues": np.ones((2, 3)), "sample": [0, 1], "epoch": 0, "step": 0},
        {"sample": [0, 1], "class": [0, 1], "epoch": 0, "step": 0,
         "original": np.zeros((2, 2, 2, 1), np.uint8)},
    )  # fmt: skip
    ledger.write_probes(np.zeros((2, 2, 2, 1), np.uint8), [0, 1], [0, 1])


FILES = ("run.json", "ledger/part-000000.csv", "spectra/part-000000.npz",
         "attacks/part-000000.npz", "probes.npz")  # fmt: skip


@many
@given(st.sampled_from(FILES), st.data())
def test_ledgers_and_arrays_of_other_bytes(name: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        quietly(lambda: recorded(folder))
        before = (folder / name).read_bytes()
        cut = data.draw(st.integers(0, len(before)))
        patch = data.draw(st.binary(max_size=20))
        (folder / name).write_bytes(before[:cut] + patch + before[cut + len(patch) :])
        quietly(lambda: read_all(folder))


@few
@given(
    st.sampled_from(["class_names", "config", "quantities", "notes", "created", "run",
                     "message", "arguments", "schema_version", "files"]),
    JSON,
)  # fmt: skip
def test_reports_of_other_metadata(key: str, value: object) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        quietly(lambda: recorded(folder))
        content = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**content, key: value}))
        quietly(lambda: write_report(folder))


@few
@given(
    st.sampled_from(
        [
            "pixels",
            "index",
            "label",
            "original",
            "eigenvalues",
            "sample",
            "class",
            "epoch",
            "step",
        ]
    ),
    st.sampled_from([(), (0,), (2,), (3,), (2, 2), (2, 0), (2, 2, 2, 1), (2, 2, 2, 4)]),
    st.sampled_from(["u1", "i8", "f8", "f2", "c16", "U3", "b1", "M8[s]"]),
)
def test_reports_of_other_arrays(name: str, shape: tuple[int, ...], kind: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        quietly(lambda: recorded(folder))
        (folder / "run.json").unlink()
        for file in FILES[2:]:
            with np.load(folder / file) as held:
                arrays = {k: held[k] for k in held.files}
            if name in arrays:
                arrays[name] = np.zeros(shape, kind)
                (folder / file).write_bytes(encode_arrays(arrays))
        quietly(lambda: write_report(folder))


CHECKPOINT = {
    "state_dict": {"w": torch.zeros(2)}, "epoch": 1, "global_step": 3,
    "callbacks": {}, "loops": {},
}  # fmt: skip


@many
@given(st.data())
def test_checkpoints(data: st.DataObject) -> None:
    stream = io.BytesIO()
    if data.draw(st.booleans()):
        key = data.draw(st.sampled_from([*CHECKPOINT, "other"]))
        torch.save({**CHECKPOINT, key: data.draw(JSON)}, stream)
        content = stream.getvalue()
    else:
        torch.save(CHECKPOINT, stream)
        content = stream.getvalue()
        cut = data.draw(st.integers(0, len(content)))
        patch = data.draw(st.binary(max_size=20))
        content = content[:cut] + patch + content[cut + len(patch) :]
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "some.ckpt"
        path.write_bytes(content)
        says(lambda: read_checkpoint(path))


@many
@given(st.data())
def test_states_of_callbacks(data: st.DataObject) -> None:
    state: Any = Progress(run="r", position=2).state()
    key = data.draw(st.sampled_from([*state, "other"]))
    says(lambda: Progress.from_state({**state, key: data.draw(JSON)}))


@pytest.mark.parametrize(
    "content",
    [
        "a: [",
        "- 1\n- 2",
        "trainer: 3",
        "model: {class_path: os.system}",
        yaml.safe_dump({"trainer": {"callbacks": [{"class_path": 3}]}}),
        yaml.safe_dump({"trainer": {"max_epochs": "many"}}),
        yaml.safe_dump({"trainer": {"limit_train_batches": math.nan}, "data": []}),
        "\0",
    ],
)
def test_configs(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    assert main(["fit", "--config", str(path)]) in (1, 2)
    assert "leakwatch fit: error: " in capsys.readouterr().err
