"""The defenses that come with the package, as one type."""

from __future__ import annotations

from typing import TypeAlias

from leakwatch.defenses.budgeted_pruning import PruningToBudget
from leakwatch.defenses.dpsgd import DPSGD
from leakwatch.defenses.eigen.noise import EigenNoise
from leakwatch.defenses.gaussian import GaussianNoise
from leakwatch.defenses.mixup import MixUp
from leakwatch.defenses.pruning import GradientPruning

__all__ = ["ShippedDefense"]

ShippedDefense: TypeAlias = (
    GaussianNoise | GradientPruning | PruningToBudget | EigenNoise | DPSGD | MixUp
)
"""For arguments that come from YAML, which needs classes: a protocol with attributes
can't be told from a class path. Code takes any :class:`Defense`."""
