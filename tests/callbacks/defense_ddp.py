"""Defended trainings in two processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from defense_cases import Known, inputs
from monitor_cases import fit
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from leakwatch.callbacks import GradientDefense
from leakwatch.defenses import Budget, GaussianNoise, MixUp

STEPS, STD = 200, 0.3


def go(folder: Path, defense: GradientDefense, steps: int = STEPS) -> Known:
    """Two micro-batches of two samples a step, from each of two processes."""
    data = TensorDataset(inputs(8 * steps), torch.zeros(8 * steps))
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, 2, int(os.environ["RANK"]), shuffle=False
    )
    module = Known()
    fit(
        folder,
        defense,
        module=module,
        data=DataLoader(data, 2, sampler=sampler),
        use_distributed_sampler=False,
        accumulate_grad_batches=2,
        strategy="ddp",
        devices=2,
    )
    return module


def defended(folder: Path) -> dict[str, Any]:
    """What was consumed, and how two wrong defenses were refused."""
    rank = int(os.environ["RANK"])
    noise = GaussianNoise(Budget(STD, "std"))
    watched = GradientDefense(noise)
    module = go(folder, watched)
    found: dict[str, Any] = {
        "consumed": torch.stack(module.recording.consumed).tolist(),
        "std": watched.summary.std,
    }
    refused = {
        "seeds": GradientDefense(noise, seed=rank),
        "samples": GradientDefense(MixUp()),
    }
    for name, wrong in refused.items():
        try:
            go(folder, wrong, steps=1)
        except RuntimeError as error:
            found[name] = str(error)
    return found
