"""The published attacks on weight updates by name.

Example:
    >>> get("sme").restarts
    1
"""

from __future__ import annotations

from typing import TypeAlias

from leakwatch.attacks.registry import PublishedAttack, Registry
from leakwatch.attacks.updates.base import UpdateAttack
from leakwatch.attacks.updates.simulation import SimulationAttack
from leakwatch.attacks.updates.surrogate import SurrogateAttack

__all__ = ["UpdatePreset", "available", "get", "register", "resolve"]

UpdatePreset: TypeAlias = PublishedAttack[UpdateAttack]
"""An attack on updates as it was published."""

_PRESETS = Registry[UpdateAttack]("attack on updates")
register, available = _PRESETS.register, _PRESETS.available
get, resolve = _PRESETS.get, _PRESETS.resolve


_DIFFERS = (
    "Returned is the best step by the objective, not the last. TV is a mean over "
    "differences in height plus one over width, so its weight is half of the published "
    "0.01, which stands on their average."
)

IG_UPDATE = register(
    UpdatePreset(
        SurrogateAttack(name="ig-update", alpha=1.0, alpha_lr=0.0),
        start="normal",
        restarts=1,
        source="Geiping, Bauermeister, Dröge, Moeller: Inverting Gradients, NeurIPS "
        "2020, with the settings of Zhu, Yao, Blaschko: Surrogate Model Extension "
        "(SME), ICML 2023, for weight updates",
        differs=_DIFFERS,
    )
)
"""The whole update as if it were one gradient at w_0: the baseline of SME."""

SME = register(
    UpdatePreset(
        SurrogateAttack(name="sme"),
        start="normal",
        restarts=1,
        source="Zhu, Yao, Blaschko: Surrogate Model Extension (SME): A Fast and "
        "Accurate Weight Update Attack on Federated Learning, ICML 2023",
        differs=f"{_DIFFERS} α moves at every eighth step, eight times as far "
        f"(``alpha_every=1`` is as published). α is that of the paper, the weight of "
        f"w_0; the published code's is the weight of w_T. The code's exception for ViT "
        f"(a smaller step size without decay) is not made: the paper claims one "
        f"setting for all.",
    )
)
"""The update as a gradient between w_0 and w_T, at a place that is learned."""

DLFA = register(
    UpdatePreset(
        SimulationAttack(),
        start="normal",
        restarts=1,
        source="Dimitrov, Balunović, Konstantinov, Vechev: Data Leakage in Federated "
        "Averaging, TMLR 2022; settings of their code for FEMNIST",
        differs="Returned is the best step by the objective over f_t, not the last. "
        "Images of different epochs are matched within their class, by squared error. "
        "Labels are dealt out so that every batch has its share of each class, where "
        "the code takes counted labels in one order. Local momentum and weight decay "
        "are simulated too. Where all samples are one batch, all epochs share one set "
        "of images (``every_epoch=True`` is as published).",
    )
)
"""All local steps simulated, with images of their own for each epoch of batches."""

DLFA_CIFAR = register(
    UpdatePreset(
        SimulationAttack(
            name="dlfa-cifar",
            lr=0.1,
            decay=0.997,
            decay_every=20,
            tv=0.0002,
            clip=10.0,
            order=6.075,
            order_prior="l2_max_conv",
            fit=(4.0, 2.0),
        ),
        start="normal",
        restarts=1,
        source="Dimitrov, Balunović, Konstantinov, Vechev: Data Leakage in Federated "
        "Averaging, TMLR 2022; settings of their code for CIFAR-100",
        differs="As for dlfa.",
    )
)
"""The same with the settings for colour images."""
