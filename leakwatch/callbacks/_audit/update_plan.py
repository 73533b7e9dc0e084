"""How the clients of a round are audited, and what is recorded of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, final, runtime_checkable

from leakwatch.attacks.start import StartKind
from leakwatch.attacks.updates.presets import UpdateAttack
from leakwatch.callbacks._recording.run_metadata import describe_scores
from leakwatch.federated import Round
from leakwatch.scores import Score
from leakwatch.scores.updates.client import JOINT, Effort

__all__ = [
    "CLIENT_QUANTITIES",
    "Federated",
    "UpdatePlan",
    "describe_clients",
    "describe_update_scores",
]

#: What is recorded of each client under ``update/client-<number>/``.
CLIENT_QUANTITIES: Final = {
    "psnr": "mean PSNR of the reconstructions of the client's samples, of those whose "
    "attack was conclusive, dB",
    "alpha": "α of the attack's network αw_0 + (1−α)w_T",
    "loss": "1 − cos between the client's update and what its reconstruction explains",
    "seconds": "time of the attack, divided by the clients attacked at once",
    "surrogate_alpha": "α at which the true samples' gradient is most similar to the "
    "update; at which the scores hold",
    "surrogate_similarity": "that cosine; 1 minus it is the least loss of the true "
    "samples",
    "surrogate_mismatch": "‖δ‖/‖g‖ there",
}


@runtime_checkable
class Federated(Protocol):
    """What a module must keep for its rounds to be audited."""

    last_round: Round | None
    """The round just completed, with what each client sent and held."""


@final
@dataclass(frozen=True)
class UpdatePlan:
    """How clients are attacked and scored.

    Attributes:
        attack: on their updates.
        start: where it begins.
        restarts: tries.
        labels: whether the server knows how many samples of each class a client has.
        training: whether the server knows the local training.
        scores: to compare with.
        metrics: of the quality.
        effort: what scoring may cost.
        time_limit: seconds for the attack on clients with equally many samples.
        seed: of the starts.
    """

    attack: UpdateAttack
    start: StartKind
    restarts: int
    labels: bool
    training: bool
    scores: tuple[Score, ...]
    metrics: tuple[str, ...]
    effort: Effort
    time_limit: float | None
    seed: int

    @property
    def score_names(self) -> list[str]:
        """Scores of each sample."""
        names = [s.name for s in self.scores] if self.effort.blocks else []
        return [*names, *(JOINT if self.effort.joint else ())]


def describe_update_scores(scores: Sequence[Score]) -> dict[str, dict[str, str]]:
    """Unit, direction, meaning and source of the scores of each sample.

    Args:
        scores: of samples whose client's other samples are known.

    Returns:
        Their descriptions, and those of the joint scores.
    """
    known = describe_scores(scores)
    for entry in known.values():
        entry["meaning"] += " (Of its part of the client's update, others known.)"
    for name in JOINT:
        decibels = name.endswith("psnr")
        known[name] = {
            "unit": "dB" if decibels else "pixel (norm over the image)",
            "direction": f"higher = {'more' if decibels else 'less'} exposed",
            "meaning": "Recovery of the image predicted from all of the client's "
            "update, its other images unknown.",
            "source": "Bayesian form of I²F with the mismatch of SME's surrogate",
        }
    return known


def describe_clients(clients: Iterable[int]) -> dict[str, dict[str, str]]:
    """Unit, direction, meaning and source of what is recorded of each client.

    Args:
        clients: their numbers.
    """
    units = {"psnr": "dB", "seconds": "s"}
    return {
        f"update/client-{client}/{name}": {
            "unit": units.get(name, ""),
            "direction": "higher = more exposed" if name == "psnr" else "",
            # Not the sign α.
            "meaning": f"{meaning[:1].upper() if meaning[0].isascii() else meaning[0]}"
            f"{meaning[1:]}.",
            "source": "SME, Zhu et al., ICML 2023",
        }
        for client in clients
        for name, meaning in CLIENT_QUANTITIES.items()
    }
