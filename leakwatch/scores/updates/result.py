"""What scoring weight updates returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor

from leakwatch.status import Measured, Status

__all__ = ["UpdateScores"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class UpdateScores(Measured):
    """Scores of clients' samples: ``result["i2f_bayes_psnr"]`` is ``(clients, N)``.

    A name without prefix is about a sample of which the attacker knows all others
    (bounds of the error from below); ``joint_…`` about the same sample when he knows
    none.

    Attributes:
        numbers: score → ``(clients, N)`` float64, NaN where there is no number.
        status: score → one :class:`Status` for each sample of each client.
        client_numbers: score → ``(clients,)`` float64, of all samples of a client as
            one input with N·d_x elements.
        client_status: score → one status for each client.
        alpha: α of the surrogate at which each client was scored, ``(clients,)``.
        similarity: cosine between w_0 − w_T and the mean gradient there.
        mismatch: ‖δ‖/‖g_ŵ(X)‖ there.
        noise_std: s assumed for the Bayesian scores, ``(clients,)``.
        notes: what a reader should know.
        seconds: wall-clock time.
    """

    kind: ClassVar[str] = "score"
    numbers: dict[str, Float[Tensor, "clients N"]]
    status: dict[str, tuple[tuple[Status, ...], ...]]
    client_numbers: dict[str, Float[Tensor, " clients"]]
    client_status: dict[str, tuple[Status, ...]]
    alpha: Float[Tensor, " clients"]
    similarity: Float[Tensor, " clients"]
    mismatch: Float[Tensor, " clients"]
    noise_std: Float[Tensor, " clients"]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
