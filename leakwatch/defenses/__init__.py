"""Defenses: what a client changes about a gradient before it shares it.

A :class:`Defense` turns gradients, and the samples that made them, into messages.
`GaussianNoise`, `GradientPruning` and `DPSGD` look at gradients only; `EigenNoise` at
the Jacobian of each sample (``eigen/``); `MixUp` at the samples. What they give,
`Shared`, says how large the random part is and what an attacker who knows the defense
has: :func:`observed` is what that attacker matches, :func:`predicted_errors` what both
attackers are expected to reach, :func:`energy_share` how much of a budget lands where
they look.

A new defense is one file, see :class:`Defense`, and one line below that registers it.
"""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

from leakwatch.defenses.adaptive_attacker import Observation, averaged, observed
from leakwatch.defenses.base import (
    Defense,
    Knowledge,
    Needs,
    Reduction,
    Shared,
    perturbation,
)
from leakwatch.defenses.budget import Budget, expected_norm
from leakwatch.defenses.covariance import Coefficients, Covariance, Diagonal, Isotropic
from leakwatch.defenses.dpsgd import DPSGD, dp_sgd
from leakwatch.defenses.eigen.allocations import (
    Allocation,
    InputSpace,
    Proportional,
    Single,
    Smallest,
    Waterfill,
    energy_in_range,
    energy_share,
)
from leakwatch.defenses.eigen.basis import Basis
from leakwatch.defenses.eigen.input_space import InRange
from leakwatch.defenses.eigen.noise import EigenNoise
from leakwatch.defenses.eigen.row_norms import RowNorms, row_norms
from leakwatch.defenses.gaussian import GaussianNoise
from leakwatch.defenses.linear_maps import (
    Chain,
    Deflation,
    LinearMap,
    Scaling,
    Selection,
    mapped,
)
from leakwatch.defenses.mixing import Mixing
from leakwatch.defenses.mixup import MixUp
from leakwatch.defenses.prediction import PredictedErrors, predicted_errors
from leakwatch.defenses.privacy import PrivacyLoss, privacy_loss
from leakwatch.defenses.pruning import GradientPruning, PruningToBudget
from leakwatch.defenses.registry import register_defense, registered_defenses
from leakwatch.defenses.samples import Samples

register_defense("gaussian", GaussianNoise)
register_defense("pruning", PruningToBudget)
register_defense("eigen-diagonal", partial(EigenNoise, allocation="diagonal"))
register_defense("eigen-proportional", partial(EigenNoise, allocation="proportional"))
register_defense("eigen-single", partial(EigenNoise, allocation="single"))
register_defense(
    "eigen-smallest",
    lambda budget, directions: EigenNoise(budget, Smallest(directions)),
)
register_defense(
    "eigen-waterfill", lambda budget, box: EigenNoise(budget, Waterfill(box))
)
register_defense(
    "eigen-input_space", lambda budget, box: EigenNoise(budget, InputSpace(box))
)

ShippedDefense: TypeAlias = Defense
"""For arguments that come from YAML: any defense by its class path."""

__all__ = [
    "DPSGD",
    "Allocation",
    "Basis",
    "Budget",
    "Chain",
    "Coefficients",
    "Covariance",
    "Defense",
    "Deflation",
    "Diagonal",
    "EigenNoise",
    "GaussianNoise",
    "GradientPruning",
    "InRange",
    "InputSpace",
    "Isotropic",
    "Knowledge",
    "LinearMap",
    "MixUp",
    "Mixing",
    "Needs",
    "Observation",
    "PredictedErrors",
    "PrivacyLoss",
    "Proportional",
    "PruningToBudget",
    "Reduction",
    "RowNorms",
    "Samples",
    "Scaling",
    "Selection",
    "Shared",
    "ShippedDefense",
    "Single",
    "Smallest",
    "Waterfill",
    "averaged",
    "dp_sgd",
    "energy_in_range",
    "energy_share",
    "expected_norm",
    "mapped",
    "observed",
    "perturbation",
    "predicted_errors",
    "privacy_loss",
    "register_defense",
    "registered_defenses",
    "row_norms",
]
