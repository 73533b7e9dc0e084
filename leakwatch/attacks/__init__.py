"""Gradient inversion: what a server could rebuild from the gradient that it is given.

An attack starts at images of its own and changes them until they would share the same
gradient. Its result says how far it came (:class:`Reconstruction`): a gradient that
was not matched shows that this attack failed, never that the sample is safe.

In reading order:

- `api`: :func:`attack`, everything in one call; `presets`: the published attacks by
  name, kept in a `registry`.
- `base`: what all attacks have in common, and how to add one.
- `shared_gradient`, `start`, `pixels`: what an attack is given; `result`, `verdict`:
  what it returns, and what that is worth.
- `first_order`: descent on the distance of gradients, made of `matching` (the distance
  and its derivative, for many attacks at once) and `optimizers`.
- `gauss_newton`: the second-order attacker; `combined`: one after the other.
- `generators`: search a generator's inputs or weights instead of pixels.
- `labels`: classes read off the gradient of the last layer.
- `updates`: attacks on the weights that a federated client sends back.
"""

from __future__ import annotations

from leakwatch.attacks.api import attack
from leakwatch.attacks.base import (
    Attack,
    GradientAttack,
    GradientTask,
    Progress,
    SearchResult,
)
from leakwatch.attacks.coarse_to_fine import CoarseToFine
from leakwatch.attacks.combined import Combined
from leakwatch.attacks.first_order import FirstOrder
from leakwatch.attacks.gauss_newton.attack import GaussNewton
from leakwatch.attacks.generators.ci_net import CINetAttack
from leakwatch.attacks.generators.gias import GIASAttack
from leakwatch.attacks.labels.infer import infer_labels
from leakwatch.attacks.matching.priors import Priors
from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.presets import Preset
from leakwatch.attacks.presets import register as register_attack
from leakwatch.attacks.result import Reconstruction, UpdateReconstruction
from leakwatch.attacks.shared_gradient import SharedGradient
from leakwatch.attacks.start import Start
from leakwatch.attacks.updates.api import attack_update
from leakwatch.attacks.updates.base import UpdateAttack, UpdateTask
from leakwatch.attacks.updates.presets import UpdatePreset
from leakwatch.attacks.updates.presets import register as register_update_attack
from leakwatch.attacks.updates.simulation import SimulationAttack
from leakwatch.attacks.updates.surrogate import SurrogateAttack

__all__ = [
    "Attack",
    "CINetAttack",
    "CoarseToFine",
    "Combined",
    "FirstOrder",
    "GIASAttack",
    "GaussNewton",
    "GradientAttack",
    "GradientTask",
    "PixelScale",
    "Preset",
    "Priors",
    "Progress",
    "Reconstruction",
    "SearchResult",
    "SharedGradient",
    "SimulationAttack",
    "Start",
    "SurrogateAttack",
    "UpdateAttack",
    "UpdatePreset",
    "UpdateReconstruction",
    "UpdateTask",
    "attack",
    "attack_update",
    "infer_labels",
    "register_attack",
    "register_update_attack",
]
