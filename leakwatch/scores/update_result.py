"""What scoring weight updates returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from leakwatch.status import Status

__all__ = ["UpdateScores"]


@final
@dataclass(frozen=True, eq=False)
class UpdateScores(Mapping[str, Tensor]):
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

    def __getitem__(self, name: str) -> Tensor:
        self._check(name)
        return self.numbers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def usable(self, name: str) -> Bool[Tensor, "clients N"]:
        """Which samples have a number worth reading.

        Raises:
            KeyError: if that score is not in the result.
        """
        self._check(name)
        return torch.tensor([[s.usable for s in row] for row in self.status[name]])

    def _check(self, name: str) -> None:
        if name not in self.numbers:
            raise KeyError(
                f"no score {name!r} in this result; it holds {', '.join(self.numbers)}"
            )
