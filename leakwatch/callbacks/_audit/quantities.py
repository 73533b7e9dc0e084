"""What audits record of each attacked sample, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from leakwatch.callbacks._audit.plan import Kind
from leakwatch.callbacks._recording.run_metadata import describe_scores
from leakwatch.quality import METRICS
from leakwatch.reporting.message import GRADIENT, Message
from leakwatch.reporting.quantities import HIGHER_LESS, HIGHER_MORE, Quantity
from leakwatch.reporting.words import CLEARLY_ABOVE, HARDLY_BELOW
from leakwatch.scores import Score
from leakwatch.scores.updates.client import JOINT

__all__ = ["describe_attacks", "describe_clients", "describe_update_scores"]

#: Where an attack of each kind starts, for readers.
STARTS: Final[dict[Kind, str]] = {
    "near": "worst case: the attack starts beside the true sample",
    "random": "practical: the attack starts at noise",
}


#: What is recorded of each client under ``update/client-<number>/``.
CLIENT_QUANTITIES: Final = {
    "psnr": "Mean PSNR of the reconstructions of the client's samples, of those whose "
    "attack was conclusive, dB",
    "alpha": "α of the attack's network αw_0 + (1−α)w_T",
    "loss": "1 − cos between the client's update and what its reconstruction explains",
    "matched": "1 if the attack explained the update, 0 if not, which shows no safety; "
    "where a server knows no samples to compare with",
    "seconds": "Time of the attack, divided by the clients attacked at once",
    "surrogate_alpha": "α at which the true samples' gradient is most similar to the "
    "update; at which the scores hold",
    "surrogate_similarity": "That cosine; 1 minus it is the least loss of the true "
    "samples",
    "surrogate_mismatch": "‖δ‖/‖g‖ there",
}


def describe_attacks(
    attacks: Mapping[Kind, str],
    metrics: Sequence[str],
    match: str = "‖g(x) − g*‖/‖g*‖ at the reconstruction: how far it came",
    message: Message = GRADIENT,
) -> dict[str, Quantity]:
    """Unit, direction, meaning and source of what is recorded of attacked samples.

    Args:
        attacks: kind of start → name of the attack.
        metrics: of the quality.
        match: what the measure of matching means.
        message: what is attacked.
    """
    quantities = []
    for kind, attack in attacks.items():
        where = f"{attack}, {STARTS[kind]}"
        for name in metrics:
            metric = METRICS[name]
            quantities.append(
                Quantity(
                    f"audit/{kind}/{name}",
                    metric.unit,
                    HIGHER_MORE if metric.higher_is_better else HIGHER_LESS,
                    f"{metric.meaning} ({where})",
                    metric.source,
                )
            )
        quantities += [
            Quantity(
                f"audit/{kind}/best_psnr",
                "dB",
                HIGHER_MORE,
                "PSNR of the try that is nearest to the sample: the worst case over "
                f"tries. Only who knows the sample finds it; psnr is that of the try "
                f"which matches best, as an attacker would choose ({where})",
            ),
            Quantity(f"audit/{kind}/match", meaning=f"{match} ({where})"),
            Quantity(
                f"audit/{kind}/verdict",
                direction=HIGHER_MORE,
                meaning=f"1 recovered (PSNR of {CLEARLY_ABOVE:g} dB or more), 0.5 "
                f"partly ({HARDLY_BELOW:g} dB or more), 0 not although the "
                f"{message.noun} was matched; no number where the attack was "
                f"inconclusive ({where})",
            ),
        ]
    quantities += [
        Quantity(
            "audit/baseline/constant_psnr",
            "dB",
            meaning="PSNR of the best image of one colour: what an attack must beat",
        ),
        Quantity(
            "audit/baseline/mean_psnr",
            "dB",
            meaning="PSNR of the mean image of the data: a guess without any "
            f"{message.noun}",
        ),
        Quantity(
            "image_std", "pixel", meaning="Standard deviation over the image's pixels"
        ),
        Quantity(
            "image_tv",
            "pixel",
            meaning="Mean absolute difference of neighbouring pixels",
        ),
    ]
    return {quantity.name: quantity for quantity in quantities}


def describe_update_scores(scores: Sequence[Score]) -> dict[str, Quantity]:
    """Unit, direction, meaning and source of the scores of each sample.

    Args:
        scores: of samples whose client's other samples are known.

    Returns:
        Their descriptions, and those of the joint scores.
    """
    alone = " (Of its part of the client's update, others known.)"
    described = {
        name: replace(quantity, meaning=quantity.meaning + alone)
        for name, quantity in describe_scores(scores).items()
    }
    for name in JOINT:
        decibels = name.endswith("psnr")
        described[name] = Quantity(
            name,
            "dB" if decibels else "pixel (norm over the image)",
            HIGHER_MORE if decibels else HIGHER_LESS,
            "Recovery of the image predicted from all of the client's update, its "
            "other images unknown.",
            "Bayesian form of I²F with the mismatch of SME's surrogate",
        )
    return described


def describe_clients(clients: Iterable[int]) -> dict[str, Quantity]:
    """Unit, direction, meaning and source of what is recorded of each client.

    Args:
        clients: their numbers.
    """
    units = {"psnr": "dB", "seconds": "s"}
    quantities = [
        Quantity(
            f"update/client-{client}/{name}",
            units.get(name, ""),
            HIGHER_MORE if name == "psnr" else "",
            f"{meaning}.",
            "SME, Zhu et al., ICML 2023",
        )
        for client in clients
        for name, meaning in CLIENT_QUANTITIES.items()
    ]
    return {quantity.name: quantity for quantity in quantities}
