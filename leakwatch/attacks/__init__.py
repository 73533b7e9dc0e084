"""Gradient inversion: what a server could rebuild from the gradient that it is given.

An attack starts at images of its own and changes them until they would share the same
gradient. Its result says how far it came (:class:`Reconstruction`): a gradient that
was not matched shows that this attack failed, never that the sample is safe.

Names are imported at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leakwatch.attacks.api import attack
    from leakwatch.attacks.base import Attack, Progress
    from leakwatch.attacks.first_order import FirstOrder
    from leakwatch.attacks.gauss_newton.attack import GaussNewton
    from leakwatch.attacks.generators.ci_net import CINetAttack
    from leakwatch.attacks.generators.gias import GIASAttack
    from leakwatch.attacks.labels.infer import infer_labels
    from leakwatch.attacks.pixels import PixelScale
    from leakwatch.attacks.result import Reconstruction
    from leakwatch.attacks.shared_gradient import SharedGradient
    from leakwatch.attacks.start import Start
    from leakwatch.attacks.update_result import UpdateReconstruction
    from leakwatch.attacks.updates.api import attack_update
    from leakwatch.attacks.updates.simulation import SimulationAttack
    from leakwatch.attacks.updates.surrogate import SurrogateAttack

__all__ = [
    "Attack",
    "CINetAttack",
    "FirstOrder",
    "GIASAttack",
    "GaussNewton",
    "PixelScale",
    "Progress",
    "Reconstruction",
    "SharedGradient",
    "SimulationAttack",
    "Start",
    "SurrogateAttack",
    "UpdateReconstruction",
    "attack",
    "attack_update",
    "infer_labels",
]

_HOME = {
    "Attack": "base",
    "CINetAttack": "generators.ci_net",
    "FirstOrder": "first_order",
    "GIASAttack": "generators.gias",
    "GaussNewton": "gauss_newton.attack",
    "PixelScale": "pixels",
    "Progress": "base",
    "Reconstruction": "result",
    "SharedGradient": "shared_gradient",
    "SimulationAttack": "updates.simulation",
    "Start": "start",
    "SurrogateAttack": "updates.surrogate",
    "UpdateReconstruction": "update_result",
    "attack": "api",
    "attack_update": "updates.api",
    "infer_labels": "labels.infer",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"leakwatch.attacks.{_HOME[name]}"), name)
    raise AttributeError(f"module 'leakwatch.attacks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
