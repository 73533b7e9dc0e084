from __future__ import annotations

import pytest
import torch
from score_problems import CASES, Problem, solved

from leakwatch.defenses import Samples
from leakwatch.derivatives import GradientMap


@pytest.fixture(scope="session")
def problem() -> Problem:
    """A network of 64 inputs and 1,510 parameters, with the dense J of two samples."""
    return solved(CASES[1])


@pytest.fixture(scope="session")
def samples(problem: Problem) -> Samples:
    gradients = GradientMap(problem.net, dtype=torch.float64)
    return Samples(gradients, problem.pixels, problem.y)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def partial(problem: Problem) -> Samples:
    """Only the last layer is shared: J has rank 20, and 44 directions are hidden."""
    gradients = GradientMap(problem.net, parameters="3", dtype=torch.float64)
    return Samples(gradients, problem.pixels, problem.y)
