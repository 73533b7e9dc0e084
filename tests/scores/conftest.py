from __future__ import annotations

import pytest
from score_problems import CASES, Problem, solved
from torch import Tensor, nn

from leakwatch.scores import registry


@pytest.fixture(scope="session", params=CASES, ids=lambda case: case.name)
def problem(request: pytest.FixtureRequest) -> Problem:
    return solved(request.param)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone afterwards."""
    monkeypatch.setattr(registry, "_SCORES", dict(registry._SCORES))
    copied = {name: list(members) for name, members in registry._GROUPS.items()}
    monkeypatch.setattr(registry, "_GROUPS", copied)


@pytest.fixture
def small() -> tuple[nn.Module, Tensor, Tensor]:
    """A network of 64 inputs that takes milliseconds, with five samples."""
    case = CASES[1]
    return case.make(), *case.data(5)
