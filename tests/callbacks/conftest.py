from __future__ import annotations

from pathlib import Path

import pytest

# What Lightning says about tiny runs (few workers, few batches, no validation) and
# about checkpoints that another Trainer wrote.
_LIGHTNING = (
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:Be aware that when using `ckpt_path`:UserWarning",
    "ignore:The dirpath has changed:UserWarning",
    "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings(*_LIGHTNING))
