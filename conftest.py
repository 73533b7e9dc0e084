"""Where tests of devices run; scores that docstrings register are gone after them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

#: Doctests of what is not installed here.
collect_ignore = [] if find_spec("flwr") else ["leakwatch/integrations/flower"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--device cuda``: tests of devices run there, and nowhere else."""
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default=None,
        help="where tests of devices run; default: the CPU, and CUDA if there is any",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test with the argument ``device`` runs on each device."""
    if "device" not in metafunc.fixturenames:
        return
    asked = metafunc.config.getoption("--device")
    if asked is None:
        import torch

        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    else:
        devices = [asked]
    metafunc.parametrize("device", devices)


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
