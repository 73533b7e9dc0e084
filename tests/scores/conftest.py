from __future__ import annotations

from collections.abc import Iterator

import pytest
from score_problems import CASES, Case, Oracle, Problem
from torch import Tensor, nn

from leakwatch.scores import registry


@pytest.fixture(scope="session", params=CASES, ids=lambda case: case.name)
def problem(request: pytest.FixtureRequest) -> Problem:
    case: Case = request.param
    net = case.make()
    pixels, y = case.data(2)
    oracles = tuple(Oracle(net, *sample) for sample in zip(pixels, y, strict=True))
    return Problem(case, net, pixels, y, oracles)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone afterwards."""
    monkeypatch.setattr(registry, "_SCORES", dict(registry._SCORES))
    copied = {name: list(members) for name, members in registry._GROUPS.items()}
    monkeypatch.setattr(registry, "_GROUPS", copied)
    yield


@pytest.fixture
def small() -> tuple[nn.Module, Tensor, Tensor]:
    """A network of 64 inputs that takes milliseconds, with five samples."""
    case = CASES[1]
    return case.make(), *case.data(5)
