from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

TINY: dict[str, Any] = {
    "paper": "lavp",
    "item": "Table 1",
    "title": "tiny",
    "claim": "none",
    "kind": "correlation",
    "published": "lavp-table-1",
    "headline": [["digits+L2", "max", "mse"]],
    "scales": {
        "small": {
            "rows": [
                {"data": "mnist_sample", "attack": "L2", "beside": "C-10+L2"},
                {"data": "mnist_sample", "attack": "CS"},
            ],
            "attacks": {
                "L2": {"preset": "lavp-l2", "steps": 3, "restarts": 1},
                "CS": {"preset": "lavp-cosine", "steps": 3, "restarts": 1},
            },
            "networks": {"linear": {"model": "linear", "epochs": 1, "images": 64}},
            "seeds": 2,
            "images": 6,
            "scores": ["grad_norm", "lavp_l2_max"],
            "columns": {"grad_norm": "grad_norm", "max": "lavp_l2_max"},
            "metrics": ["mse", "psnr"],
        }
    },
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """An experiment of a second on digits that come along."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path
