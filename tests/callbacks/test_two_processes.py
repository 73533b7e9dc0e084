"""Two processes on a CPU see what one sees, and consume one defended gradient."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import monitor_ddp
import pytest
import torch
from defense_cases import SIZE, inputs
from defense_ddp import STD, STEPS

_PATIENCE = 600  # seconds; it takes about 30 on a quiet machine
Results = dict[str, list[dict[str, Any]]]
Defended = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes, started as torchrun starts them, wrote what they found."""
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    shared = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "leakwatch",
        "CUDA_VISIBLE_DEVICES": "",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(here / "two_processes.py"), str(folder)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        output = [process.communicate(timeout=_PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, output, strict=True):
        assert process.returncode == 0, text[-4000:]
    return folder


@pytest.fixture(scope="module")
def two(folder: Path) -> Results:
    """Case to what each of two processes found."""
    return {
        name: [json.loads((folder / f"{name}-{r}.json").read_text()) for r in (0, 1)]
        for name in monitor_ddp.CASES
    }


@pytest.fixture(scope="module")
def defended(folder: Path) -> Defended:
    """What each of two processes found of a defense."""
    return [json.loads((folder / f"defense-{r}.json").read_text()) for r in (0, 1)]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Case to what a single process finds."""
    folder = tmp_path_factory.mktemp("one")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            name: json.loads(json.dumps(monitor_ddp.CASES[name](folder / name, 1)))
            for name in ("double", "single", "one_probe", "resumed")
        }


def assert_same_record(found: list[Any], expected: list[Any], rel: float) -> None:
    keys = [[r[:5], r[6]] for r in found]
    assert keys == [[r[:5], r[6]] for r in expected]
    values = [float(r[5]) for r in found]
    assert values == pytest.approx(
        [float(r[5]) for r in expected], rel=rel, abs=0, nan_ok=True
    )
    assert len(found) > 10


def test_training_is_the_same_with_and_without(two: Results) -> None:
    for rank in (0, 1):
        assert two["double"][rank]["weights"] == two["plain"][rank]["weights"]


def test_the_record_is_one_process_s(two: Results, one: dict[str, Any]) -> None:
    for rank in (0, 1):
        found = two["double"][rank]
        assert_same_record(found["record"], one["double"]["record"], 1e-9)
        assert found["metrics"] == pytest.approx(one["double"]["metrics"], rel=1e-6)
        assert Path(found["directory"]).name == "leakwatch-run"
    assert two["double"][0]["fraction"] == two["double"][1]["fraction"]
    assert two["double"][0]["metrics"] == two["double"][1]["metrics"]


def test_the_gradient_that_training_shares_is_compared(two: Results) -> None:
    words = {
        "Double": "",
        "OneVersusRest": "is not that of the criterion on the same batch",
        "Halved": "is 0.5 times that of the criterion",
        "Weighted": "of classes (0: 2, 1: 6, 2: 1) and divides by the weights of a bat",
        "accumulated": "of classes (0: 2, 1: 6, 2: 1) and divides by the weights of a",
        "Focal": "is not that of the criterion on the same batch",
        # Neither process waits for the other where one of them can't compare.
        "Hidden": "could not be found out: TypeError: inputs and labels are not found",
        "certain": "",
        # One of them takes no step in the first batch.
        "Skipping": "is 0.5 times that of the criterion",
    }
    for rank in (0, 1):
        for name, expected in words.items():
            found = two["compared"][rank][name]
            assert found["same"]
            # One process says it, on behalf of all.
            assert len(found["said"]) == (bool(expected) and rank == 0)
            assert all(expected in text for text in found["said"])
    norms = {k: [float(v) for v in two["compared"][0][k]["norms"]] for k in words}
    # Before the first step weights are the same, and nothing is known of factors.
    assert norms["Halved"][:3] == norms["Double"][:3]
    later = [a / b for a, b in zip(norms["Halved"], norms["Double"], strict=True)][3:]
    assert max(later) < 0.7


def test_networks_that_draw_are_left_alone_and_compared(two: Results) -> None:
    words = {"Dropping": "", "DroppingHalved": "is 0.5 times that of the criterion"}
    for name, expected in words.items():
        found = [two["dropping"][rank][name] for rank in (0, 1)]
        for rank, one in enumerate(found):
            assert one["weights"] == one["alone"]
            assert one["streams"]
            assert one["weights"] == found[0]["weights"]
            assert len(one["said"]) == (bool(expected) and rank == 0)
            assert all(expected in text for text in one["said"])
            assert one["moments"] == found[0]["moments"]
            assert set(one["statuses"]) == {"ok"}
            # In evaluation nothing is drawn.
            factor = 0.5 if expected else 1.0
            right = [factor * norm for norm in one["right"]]
            assert one["norms"] == pytest.approx(right, rel=1e-6)
        # Before training, and after each of two epochs.
        assert len(found[0]["moments"]) == 9
    weights = [two["dropping"][0][name]["weights"] for name in words]
    assert weights[0] != weights[1]


def test_also_in_single_precision(two: Results, one: dict[str, Any]) -> None:
    assert_same_record(two["single"][0]["record"], one["single"]["record"], 1e-12)


def test_fewer_probes_than_processes(two: Results, one: dict[str, Any]) -> None:
    found = two["one_probe"][0]["record"]
    assert len({r[2] for r in found}) == 1
    assert_same_record(found, one["one_probe"]["record"], 1e-9)


def test_resumed(two: Results, one: dict[str, Any]) -> None:
    found = two["resumed"][0]
    assert_same_record(found["record"], one["resumed"]["record"], 1e-9)
    # Lightning restores weights in single precision before it turns to double.
    assert_same_record(found["record"], one["double"]["record"], 1e-6)
    assert found["best"] == pytest.approx(one["resumed"]["best"], rel=1e-6)


def test_a_forward_that_waits_for_others_is_refused(two: Results) -> None:
    for rank in (0, 1):
        found = two["talking"][rank]
        reduced, gathered = found["said"]
        assert "forward of Talking exchanges data between processes (allreduce)" in (
            reduced
        )
        assert "forward of Gathering exchanges data between processes" in gathered
        assert "only while self.training" in gathered
        # In training mode alone: nothing stands in the way of probes.
        assert found["epoch"] == 2
        assert "ok" in {r[6] for r in found["record"]}


def test_an_exception_in_one_process_stops_nothing(two: Results) -> None:
    found = two["broken"][0]
    assert found["epoch"] == 2
    samples = list(dict.fromkeys(r[2] for r in found["record"]))
    assert len(samples) == 3
    for _, _, sample, _, _, value, status in found["record"]:
        if samples.index(sample) % 2:
            assert status.startswith("failed: ArithmeticError: no luck")
            assert math.isnan(float(value))
        else:
            assert status == "ok"
    (said,) = found["said"]
    assert "14 of 42 values failed at epoch 0" in said
    assert two["broken"][1]["said"] == []


def test_both_consume_the_mean_gradient_and_one_noise(
    defended: Defended,
) -> None:
    assert defended[0]["consumed"] == defended[1]["consumed"]
    consumed = torch.tensor(defended[0]["consumed"])
    noise = consumed - inputs(8 * STEPS).view(STEPS, 8, SIZE).mean(1)
    assert noise.shape == (STEPS, SIZE)
    assert float(noise.std()) == pytest.approx(STD, rel=0.05)
    assert defended[0]["std"] == pytest.approx(STD, rel=0.05)


def test_processes_with_other_noise_are_stopped(defended: Defended) -> None:
    for found in defended:
        assert "processes would consume different gradients" in found["seeds"]


def test_defenses_that_look_at_samples_are_refused(
    defended: Defended,
) -> None:
    for found in defended:
        assert "which 2 processes share" in found["samples"]
