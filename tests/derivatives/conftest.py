from __future__ import annotations

import pytest
from cases import CASES, Case


@pytest.fixture(params=CASES, ids=[case.name for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found
