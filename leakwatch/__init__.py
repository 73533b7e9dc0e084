"""Watch how much of each private sample its shared gradient gives away.

``leakwatch.score`` and ``leakwatch.attack`` need PyTorch only. The callbacks for
Lightning are in :mod:`leakwatch.callbacks`, models and data sets in
:mod:`leakwatch.models` and :mod:`leakwatch.datamodules`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leakwatch.attacks import (
        Reconstruction,
        UpdateReconstruction,
        attack,
        attack_update,
    )
    from leakwatch.derivatives import GradientMap, UnsupportedModuleError
    from leakwatch.derivatives.attribution import LayerTable, layer_attribution
    from leakwatch.derivatives.jacobian import GradientJacobian
    from leakwatch.derivatives.losses import cross_entropy
    from leakwatch.probes import ProbeSet
    from leakwatch.scores import (
        ScoreResult,
        Status,
        UpdateScores,
        score,
        score_update,
    )
    from leakwatch.studies import (
        compare_initializations,
        recommend_noise,
        trade_off,
        unfairness,
    )
    from leakwatch.weight_update import LocalTraining, WeightUpdate

__version__ = "0.1.0"

__all__ = [
    "GradientJacobian",
    "GradientMap",
    "LayerTable",
    "LocalTraining",
    "ProbeSet",
    "Reconstruction",
    "ScoreResult",
    "Status",
    "UnsupportedModuleError",
    "UpdateReconstruction",
    "UpdateScores",
    "WeightUpdate",
    "__version__",
    "attack",
    "attack_update",
    "compare_initializations",
    "cross_entropy",
    "layer_attribution",
    "recommend_noise",
    "score",
    "score_update",
    "trade_off",
    "unfairness",
]

# Imported at first use: `leakwatch --help` should not wait for PyTorch.
_HOME = {
    "GradientJacobian": "leakwatch.derivatives.jacobian",
    "GradientMap": "leakwatch.derivatives",
    "LayerTable": "leakwatch.derivatives.attribution",
    "LocalTraining": "leakwatch.weight_update",
    "ProbeSet": "leakwatch.probes",
    "Reconstruction": "leakwatch.attacks",
    "ScoreResult": "leakwatch.scores",
    "Status": "leakwatch.scores",
    "UnsupportedModuleError": "leakwatch.derivatives",
    "UpdateReconstruction": "leakwatch.attacks",
    "UpdateScores": "leakwatch.scores",
    "WeightUpdate": "leakwatch.weight_update",
    "attack": "leakwatch.attacks",
    "attack_update": "leakwatch.attacks",
    "compare_initializations": "leakwatch.studies",
    "cross_entropy": "leakwatch.derivatives.losses",
    "layer_attribution": "leakwatch.derivatives.attribution",
    "recommend_noise": "leakwatch.studies",
    "score": "leakwatch.scores",
    "score_update": "leakwatch.scores",
    "trade_off": "leakwatch.studies",
    "unfairness": "leakwatch.studies",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'leakwatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
