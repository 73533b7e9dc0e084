"""What an example in a docstring registers is gone after it."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def examples_leave_no_score(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores that a doctest registers are not there for other tests."""
    if isinstance(request.node, pytest.DoctestItem):
        from leakwatch.scores import registry

        monkeypatch.setattr(registry, "_SCORES", dict(registry._SCORES))
        copied = {name: list(members) for name, members in registry._GROUPS.items()}
        monkeypatch.setattr(registry, "_GROUPS", copied)
