"""Whatever is trained, and whoever watches: training is the same to the bit.

`make test` runs a sample of the matrix, `make test-long` all of it.
"""

from __future__ import annotations

from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from observer_cases import (
    DATA,
    FEATURES,
    OPTIMIZERS,
    PRECISIONS,
    WORKERS,
    Cell,
    allowed,
    train,
)
from observer_data import CLASSES, image, label
from torch import Tensor

from leakwatch import ProbeSet
from leakwatch.callbacks import GradientDefense, InversionAudit, LeakageMonitor
from leakwatch.defenses import Budget, GaussianNoise
from leakwatch.reporting import RiskLedger

WATCHERS = ("monitor", "audit", "both")


def whole() -> list[Cell]:
    """Optimisers, precisions and features in full; data and workers in turn."""
    # Spawned workers take seconds to start: one cell in seven has them.
    sources = cycle(product(DATA, ("0", "2", "0", "2", "0", "2", "spawn")))
    return [
        cell
        for optimizer, precision, feature in product(OPTIMIZERS, PRECISIONS, FEATURES)
        if allowed(cell := Cell(optimizer, precision, feature, *next(sources)))
    ]


def sample() -> list[Cell]:
    """Each feature once, and every other value among them."""
    optimizers, precisions = cycle(OPTIMIZERS), cycle((*PRECISIONS, PRECISIONS[0]))
    data, workers = cycle(DATA), iter(("spawn", *"0000020000", "2"))
    return [
        Cell(next(optimizers), next(precisions), feature, next(data), next(workers))
        for feature in FEATURES
    ]


def watching(who: str, cell: Cell) -> list[Callback]:
    given: Any = 3
    if cell.data == "iterable":
        x = torch.stack([image(i) for i in range(CLASSES)])
        given = ProbeSet.from_tensors(x, [label(i) for i in range(CLASSES)])
    quiet: dict[str, Any] = {"report": False, "verbose": False, "every_n_epochs": 2}
    if cell.data != "iterable":
        quiet["data_range"] = 1.0
    monitor = LeakageMonitor(given, ["lavp"], **quiet)
    # Gauss-Newton costs more, and reads buffers.
    attack = "gauss-newton" if cell.feature == "BatchNorm" else "lavp-cosine"
    audit = InversionAudit(
        given, attack, scores=["grad_norm"], samples=1, steps=2, restarts=1, **quiet
    )
    return {"monitor": [monitor], "audit": [audit], "both": [audit, monitor]}[who]


def assert_same(found: Any, expected: Any, where: str) -> None:
    """Bit by bit."""
    if isinstance(expected, Tensor):
        torch.testing.assert_close(
            found, expected, rtol=0, atol=0, equal_nan=True, msg=f"{where} differs"
        )
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{where}/{i}")
    else:
        assert found == expected, where


def measured(callback: Any) -> int:
    """How many values a callback found."""
    rows = RiskLedger.open(callback.run_directory).rows()
    return sum(r.sample is not None and r.status.split(":")[0] == "ok" for r in rows)


def check(cell: Cell, root: Path, watchers: tuple[str, ...]) -> None:
    expected = train(cell, root / "without", [])
    assert expected["step"] >= 4
    for who in watchers:
        callbacks = watching(who, cell)
        found = train(cell, root / who, callbacks)
        assert_same(found, expected, who)
        assert all(measured(c) > 3 for c in callbacks)


NOTHING_TO_DO_WITH_US = (
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:.*fork.*:DeprecationWarning",
    "ignore:.*Swapping scheduler:UserWarning",
)


@pytest.mark.filterwarnings(*NOTHING_TO_DO_WITH_US)
@pytest.mark.parametrize("cell", sample(), ids=str)
def test_a_sample_of_trainings(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path, ("both",))


def test_the_sample_has_every_value() -> None:
    cells = sample()
    assert all(map(allowed, cells))
    values = (OPTIMIZERS, PRECISIONS, FEATURES, DATA, WORKERS)
    for of, field in zip(values, vars(cells[0]), strict=True):
        assert {getattr(c, field) for c in cells} == set(of)


@pytest.mark.long
@pytest.mark.filterwarnings(*NOTHING_TO_DO_WITH_US)
@pytest.mark.parametrize("cell", whole(), ids=str)
def test_every_training(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path, WATCHERS)


@pytest.mark.parametrize(
    ("optimizer", "feature"), [("SGD", "accumulation"), ("Adam", "clipping")]
)
def test_a_defended_training_is_watched(
    optimizer: str, feature: str, tmp_path: Path
) -> None:
    cell = Cell(optimizer, "32-true", feature, "cached", "0")

    def defense() -> Callback:
        return GradientDefense(GaussianNoise(Budget(0.01, "std")))

    expected = train(cell, tmp_path / "without", [defense()])
    watchers = watching("both", cell)
    found = train(cell, tmp_path / "with", [defense(), *watchers])
    assert all(measured(c) > 3 for c in watchers)
    for run in (found, expected):  # it measures the time that it took
        del run["metrics"]["defense/seconds"]
    assert_same(found, expected, "defended")
