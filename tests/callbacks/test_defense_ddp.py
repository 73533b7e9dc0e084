"""Two processes on a CPU consume the same defended gradient."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from defense_cases import SIZE, inputs
from defense_ddp import STD, STEPS

_PATIENCE = 240  # seconds; it takes about 10


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found, started as torchrun starts them."""
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
            [sys.executable, str(here / "defense_ddp.py"), str(folder)],
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
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_both_consume_the_mean_gradient_and_one_noise(
    two: list[dict[str, Any]],
) -> None:
    assert two[0]["consumed"] == two[1]["consumed"]
    consumed = torch.tensor(two[0]["consumed"])
    noise = consumed - inputs(8 * STEPS).view(STEPS, 8, SIZE).mean(1)
    assert noise.shape == (STEPS, SIZE)
    assert float(noise.std()) == pytest.approx(STD, rel=0.05)
    assert two[0]["std"] == pytest.approx(STD, rel=0.05)


def test_processes_with_other_noise_are_stopped(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert "processes would consume different gradients" in found["seeds"]


def test_defenses_that_look_at_samples_are_refused(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert "which 2 processes share" in found["samples"]
