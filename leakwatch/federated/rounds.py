"""Federated averaging: who answers, what the server makes of it, round after round."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from leakwatch.checks import check_choice, check_integer, check_number
from leakwatch.derivatives.runtime import Criterion
from leakwatch.federated.averaging import Buffers, average_updates
from leakwatch.federated.faults import check_client, check_clients, check_training
from leakwatch.federated.local import ClientUpdate, train_client
from leakwatch.federated.objective import Objective
from leakwatch.federated.streams import client_stream
from leakwatch.weight_update import LocalTraining

__all__ = [
    "Answering",
    "ClientData",
    "FederatedAveraging",
    "Round",
    "answering_clients",
]

ClientData: TypeAlias = tuple[Shaped[Tensor, "N ..."], Shaped[Tensor, "N ..."]]
"""Samples and labels of one client."""

Answering: TypeAlias = Literal["count", "chance"]

# Names the stream that draws who answers; clients have numbers below it.
_SERVER = 2**32


@final
@dataclass(frozen=True, eq=False)
class Round:
    """One communication round.

    Attributes:
        number: of the round, from 0.
        updates: of the clients that answered.
        weights: the average, which the server goes on with, ``(d_θ,)``.
        buffers: the averaged buffers by name; empty where the server keeps its own.
    """

    number: int
    updates: tuple[ClientUpdate, ...]
    weights: Float[Tensor, " d_theta"]
    buffers: dict[str, Tensor]

    @property
    def loss(self) -> float:
        """Mean loss of all local steps of all clients, weighted by their samples."""
        total = sum(u.samples for u in self.updates)
        return sum(u.samples / total * float(u.losses.mean()) for u in self.updates)


def answering_clients(
    clients: int,
    share: float = 1.0,
    *,
    answering: Answering = "count",
    round: int = 0,
    seed: int = 0,
) -> tuple[int, ...]:
    """Which clients take part in a round; one of them at least.

    Args:
        clients: how many there are.
        share: in (0, 1].
        answering: ``"count"``: exactly max(1, round(share · clients)) of them
            (McMahan et al. 2017, Algorithm 1); ``"chance"``: each with probability
            share (the stragglers of Zhu, Yao & Blaschko 2023, appendix D).
        round: the communication round, at least 0.
        seed: of the simulation, at least 0.

    Returns:
        Their numbers, ascending. The same for the same arguments, whatever was drawn
        before.

    Raises:
        TypeError: for an argument of the wrong kind.
        ValueError: for an argument out of range.

    Example:
        >>> len(answering_clients(40, 0.1)), answering_clients(3)
        (4, (0, 1, 2))
    """
    clients = check_integer("clients", clients)
    share = check_number("share", share, "(0, 1]", example=0.1)
    check_choice("answering", answering, get_args(Answering))
    draws = torch.rand(clients, generator=client_stream(seed, round, _SERVER))
    count = max(1, math.floor(share * clients + 0.5))
    if answering == "chance":
        count = max(1, int((draws < share).sum()))
    return tuple(sorted(draws.argsort(stable=True)[:count].tolist()))


@final
class FederatedAveraging:
    """A server and its clients (McMahan et al., AISTATS 2017), round by round.

    Each round, the clients that answer start from the module's weights, train as
    :func:`leakwatch.federated.train_client` does, and their average becomes the
    module's weights. All that is random depends on the seed, the round and the client
    only, so a simulation that goes on from a saved state equals one that never stopped.

    Args:
        module: the network; its weights are the server's and change with each round.
        clients: samples and labels of each. A list or tuple is checked now; another
            sequence is read anew each round, one client after the other, so that one
            that loads them keeps memory small.
        training: local training of every client.
        share: of the clients that answer in a round, in (0, 1].
        answering: see :func:`answering_clients`.
        seed: of all random streams, at least 0.
        criterion: one loss per sample. Default: accurate cross-entropy.
        dtype: arithmetic of the clients. Default: that of the parameters.
        freeze_batchnorm: whether BatchNorm keeps its running statistics.
        buffers: ``"averaged"`` or ``"kept"``, see :func:`average_updates`.

    Attributes:
        completed: rounds so far.

    Raises:
        TypeError: if ``module`` is no ``nn.Module``, ``clients`` no sequence of pairs
            of tensors, or another argument of the wrong kind.
        ValueError: for no clients, a client without samples or with other labels than
            samples, an argument out of range, or a module without trainable parameters
            or with some in half precision.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> clients = [(torch.rand(4, 3), torch.tensor([0, 1, 1, 0])) for _ in range(5)]
        >>> how = LocalTraining(epochs=2, batch_size=2, lr=0.1)
        >>> server = FederatedAveraging(net, clients, how, share=0.4)
        >>> [len(found.updates) for found in server.run(3)], server.completed
        ([2, 2, 2], 3)
    """

    def __init__(
        self,
        module: nn.Module,
        clients: Sequence[ClientData],
        training: LocalTraining,
        *,
        share: float = 1.0,
        answering: Answering = "count",
        seed: int = 0,
        criterion: Criterion | None = None,
        dtype: torch.dtype | None = None,
        freeze_batchnorm: bool = True,
        buffers: Buffers = "averaged",
    ) -> None:
        check_clients(clients)
        check_training(training)
        answering_clients(len(clients), share, answering=answering, seed=seed)
        check_choice("buffers", buffers, get_args(Buffers))
        self._objective = Objective(module, criterion, dtype)
        self._objective.check_server()
        self.module = module
        self.clients = clients
        self.training = training
        self.share = share
        self.answering: Answering = answering
        self.seed = seed
        self.criterion = criterion
        self.freeze_batchnorm = freeze_batchnorm
        self.buffers: Buffers = buffers
        self.completed = 0

    def step(self) -> Round:
        """One round: local training of those who answer, then the average.

        Returns:
            What happened; the module then holds the average.

        Raises:
            ValueError: for a client whose training diverged; the module then still
                holds the weights of before the round.
        """
        number = self.completed
        chosen = answering_clients(
            len(self.clients),
            self.share,
            answering=self.answering,
            round=number,
            seed=self.seed,
        )
        updates = tuple(self._train(client, number) for client in chosen)
        weights, buffers = average_updates(updates, self.buffers)
        self._objective.put(weights, buffers)
        self.completed += 1
        return Round(number, updates, weights, buffers)

    def run(self, rounds: int) -> Iterator[Round]:
        """Round after round; each is run when it is asked for.

        Args:
            rounds: how many more, at least 0.

        Raises:
            TypeError: if ``rounds`` is no integer.
            ValueError: if it is negative.
        """
        count = check_integer("rounds", rounds, smallest=0)
        return (self.step() for _ in range(count))

    def state_dict(self) -> dict[str, Any]:
        """All there is to go on from: weights, buffers and the number of rounds.

        With those of a criterion that is a module itself.
        """
        return {
            "module": _state(self.module),
            "criterion": _state(self.criterion),
            "completed": self.completed,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Raises:
            ValueError: if the state lacks something, or is of a simulation with
                another seed.
        """
        needed = ["module", "completed", "seed"]
        if _state(self.criterion):
            needed.append("criterion")
        missing = [key for key in needed if key not in state]
        if missing:
            raise ValueError(
                f"the state lacks {', '.join(map(repr, missing))}; pass what "
                f"state_dict() of a FederatedAveraging returned."
            )
        if state["seed"] != self.seed:
            raise ValueError(
                f"the state is of a simulation with seed={state['seed']}, this one has "
                f"seed={self.seed}, and would not go on as that one."
            )
        self.module.load_state_dict(state["module"])
        if isinstance(self.criterion, nn.Module):
            self.criterion.load_state_dict(state.get("criterion", {}))
        self.completed = state["completed"]

    def _train(self, client: int, number: int) -> ClientUpdate:
        x, y = check_client(self.clients[client], client)
        return train_client(
            self.module,
            x,
            y,
            self.training,
            client=client,
            round=number,
            seed=self.seed,
            criterion=self.criterion,
            dtype=self._objective.dtype,
            freeze_batchnorm=self.freeze_batchnorm,
        )


def _state(part: object) -> dict[str, Tensor]:
    if not isinstance(part, nn.Module):
        return {}
    return {name: t.detach().clone() for name, t in part.state_dict().items()}
