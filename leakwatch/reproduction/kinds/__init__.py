"""The kinds of experiment: one file each, and one line here."""

from __future__ import annotations

from leakwatch.reproduction.kinds.base import register
from leakwatch.reproduction.kinds.batches import Batches
from leakwatch.reproduction.kinds.correlation import Correlations
from leakwatch.reproduction.kinds.eigenvalues import Effort, Eigenvalues, Eigenvectors
from leakwatch.reproduction.kinds.exposure import Exposure
from leakwatch.reproduction.kinds.final_losses import FinalLosses
from leakwatch.reproduction.kinds.perturbed import Fairness, Levels, Prediction
from leakwatch.reproduction.kinds.updates import (
    UpdateAttacks,
    UpdateCosts,
    UpdatePaths,
)

register("correlation", Correlations)
register("exposure", Exposure)
register("final_losses", FinalLosses)
register("batches", Batches)
register("effort", Effort)
register("eigenvalues", Eigenvalues)
register("eigenvectors", Eigenvectors)
register("fairness", Fairness)
register("levels", Levels)
register("prediction", Prediction)
register("update_attacks", UpdateAttacks)
register("update_costs", UpdateCosts)
register("update_paths", UpdatePaths)
