"""The published attacks by the names that the field knows them by.

Example:
    >>> get("lavp-l2").restarts
    3
"""

from __future__ import annotations

from typing import TypeAlias

from leakwatch.attacks.base import Attack
from leakwatch.attacks.coarse_to_fine import CoarseToFine
from leakwatch.attacks.combined import Combined
from leakwatch.attacks.first_order import FirstOrder
from leakwatch.attacks.gauss_newton.attack import GaussNewton
from leakwatch.attacks.generators.ci_net import CINetAttack
from leakwatch.attacks.matching.priors import Priors
from leakwatch.attacks.registry import PublishedAttack, Registry

__all__ = ["Preset", "available", "get", "register", "resolve"]


Preset: TypeAlias = PublishedAttack[Attack]
"""An attack on a gradient as it was published."""

_PRESETS = Registry[Attack]("attack")
register, available = _PRESETS.register, _PRESETS.available
get, resolve = _PRESETS.get, _PRESETS.resolve


DLG = register(
    Preset(
        FirstOrder(
            name="dlg",
            distance="l2",
            optimizer="lbfgs",
            lr=1.0,
            schedule="constant",
            steps=1000,
            box=False,
            joint_labels=True,
        ),
        start="normal",
        restarts=1,
        source="Zhu, Liu, Han: Deep Leakage from Gradients, NeurIPS 2019",
        differs="Published: 300 iterations of up to 20 evaluations each; here a step "
        "is one evaluation, and the line search is one (torch's default takes fixed "
        "steps). L2 with the factor ½.",
    )
)
"""Image and label together, squared distance, L-BFGS with lr 1, N(0, 1) starts."""

IDLG = register(
    Preset(
        FirstOrder(
            name="idlg",
            distance="l2",
            optimizer="lbfgs",
            lr=1.0,
            schedule="constant",
            steps=1000,
            box=False,
            label_method="sign",
        ),
        start="normal",
        restarts=1,
        source="Zhao, Mopuri, Bilen: iDLG, arXiv:2001.02610 (2020)",
        differs="As for dlg. The sign rule is used when labels are not given.",
    )
)
"""The label by the sign of the last layer's gradient, then as DLG."""

INVERTING_GRADIENTS = register(
    Preset(
        FirstOrder(
            name="inverting-gradients",
            distance="cosine",
            optimizer="adam",
            lr=0.1,
            signed=True,
            schedule="step",
            steps=2000,
            priors=Priors(tv=1e-4),
            box=True,
        ),
        start="normal",
        restarts=1,
        source="Geiping, Bauermeister, Dröge, Moeller: Inverting Gradients, NeurIPS "
        "2020",
        differs="Published: 24,000 steps; total variation 1e-1 (ImageNet) to 1e-4 "
        "(CIFAR-10, single images). 1e-4 suits digits; on CIFAR-10 tv=0.2 is about "
        "5 dB better (docs/measurements/attacks.md).",
    )
)
"""Cosine distance, total variation, signed Adam with step decay, box."""

GRADINVERSION_BN = register(
    Preset(
        FirstOrder(
            name="gradinversion-bn",
            distance="l2",
            optimizer="adam",
            lr=0.1,
            schedule="cosine",
            steps=2000,
            priors=Priors(tv=1e-4, l2=1e-6, batch_norm=0.1),
            box=True,
            label_method="auto",
        ),
        start="normal",
        restarts=1,
        source="Yin, Mallya, Vahdat, Alvarez, Kautz, Molchanov: See through Gradients, "
        "CVPR 2021",
        differs="Published: 20,000 steps, group consistency between restarts, and "
        "noise on the pixels, which are left out; statistics are the running ones.",
    )
)
"""Squared distance with BatchNorm statistics, total variation and norm."""

LAVP_L2 = register(
    Preset(
        FirstOrder(
            name="lavp-l2",
            distance="l2",
            optimizer="adam",
            lr=0.1,
            schedule="step",
            steps=2000,
            priors=Priors(tv=1e-6),
            relative=True,
            box=True,
        ),
        start="normal",
        restarts=3,
        source="Hong, Cho, Cho, Ahn, Kim: Foreseeing Reconstruction Quality of "
        "Gradient Inversion, AAAI 2024",
        differs="The paper names Adam, total variation and the best of three seeds, "
        "but no weights, steps or lr.",
    )
)
"""Squared distance, Adam, total variation, best of three."""

LAVP_COSINE = register(
    Preset(
        FirstOrder(
            name="lavp-cosine",
            distance="cosine",
            optimizer="adam",
            lr=0.1,
            schedule="step",
            steps=2000,
            priors=Priors(tv=1e-6),
            box=True,
        ),
        start="normal",
        restarts=3,
        source="Hong, Cho, Cho, Ahn, Kim: Foreseeing Reconstruction Quality of "
        "Gradient Inversion, AAAI 2024",
        differs="As for lavp-l2.",
    )
)
"""Cosine distance, Adam, total variation, best of three."""

COARSE_TO_FINE = register(
    Preset(
        CoarseToFine(),
        start="normal",
        restarts=1,
        source="this library",
        differs="Not published as an attack.",
    )
)
"""Cosine distance, Adam on the frequencies of the image, from coarse to fine."""

GAUSS_NEWTON = register(
    Preset(
        GaussNewton(),
        start="uniform",
        restarts=3,
        source="Levenberg 1944, Marquardt 1963; this library",
        differs="Not published as an attack.",
    )
)
"""Levenberg–Marquardt on the difference of gradients: slow and strong."""

COMBINED = register(
    Preset(
        Combined(),
        start="normal",
        restarts=4,
        source="Geiping et al., NeurIPS 2020, then Levenberg 1944, Marquardt 1963; "
        "this library",
        differs="Not published as an attack.",
    )
)
"""Descent on pixels and from coarse to fine, then Gauss-Newton from the best."""

CI_NET = register(
    Preset(
        CINetAttack(),
        start="normal",
        restarts=1,
        source="Zhang et al.: Generative Gradient Inversion via Over-Parameterized "
        "Networks in Federated Learning, ICCV 2023",
        differs="Cosine distance as in the paper's code; its text writes a norm of the "
        "difference. Published: 150,000 steps for 256 images.",
    )
)
"""The weights of an untrained generator instead of pixels."""
