"""The server's part: what arrived is attacked, as a curious server would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.attacks import PixelScale, Start, UpdateReconstruction
from leakwatch.attacks.clock import TimeShares
from leakwatch.callbacks import UpdateAudit
from leakwatch.callbacks._audit.quantities import describe_clients
from leakwatch.checks import check_function
from leakwatch.derivatives import GradientMap
from leakwatch.federated import ClientUpdate
from leakwatch.integrations.flower.mod import RECORD
from leakwatch.integrations.flower.recording import Known, UpdateRecord, say
from leakwatch.integrations.flower.weights import (
    Network,
    arrays_in,
    client_update,
    flat,
    network_of,
    state_of,
)
from leakwatch.reporting import RiskLedger, Row, write_report
from leakwatch.reporting.message import UPDATE
from leakwatch.status import describe_error
from leakwatch.weight_update import LocalTraining, WeightUpdate

__all__ = ["AuditingStrategy", "KnownSamples"]

KnownSamples: TypeAlias = Callable[
    [int], tuple[Float[Tensor, "N ..."], Int[Tensor, " N"]]
]
"""Samples and labels of a client by its number, which only a simulation knows."""


@final
class AuditingStrategy(Strategy):  # type: ignore[misc]  # Flower has no types here
    """Attacks the updates that arrive, and leaves the federation to another strategy.

    Wraps any of Flower's strategies. After an audited round the updates of the watched
    clients are inverted (:func:`leakwatch.attack_update`) with what a server knows: the
    weights that it sent, the local training that it ordered, how many samples a client
    says it has, and nothing of their labels. Recorded are, for every client, how well
    the reconstruction explains the update, the verdict, and the images, on the server's
    disk only.

    Without ``samples`` nobody knows how near these images are to the truth. A
    simulation has the truth: with ``samples`` the record is that of
    :class:`leakwatch.callbacks.UpdateAudit`, quality, scores and correlations.

    A failure of an audit is logged and recorded; the federation goes on.

    Args:
        strategy: does the rest.
        network: that clients train, or a function that makes one.
        training: the local training that clients were told to do.
        audit: clients, attack, schedule, normalisation. Default: an attack with
            ``"sme"`` on the first two clients that answer, every round.
        sample_shape: of one sample, as the network takes it; needed without
            ``samples``.
        samples: ``samples(client)`` → samples and labels of a client, in a simulation.
        directory: of the ledger and the report.
        class_names: of the labels.
        weighted_by_key: under which clients say how many samples they have.

    Raises:
        TypeError: for arguments of the wrong kind.
        ValueError: for neither ``sample_shape`` nor ``samples``, or an audit without
            an attack.

    Example:
        >>> import torch
        >>> from flwr.serverapp.strategy import FedAvg
        >>> from leakwatch import LocalTraining
        >>> from leakwatch.integrations.flower import AuditingStrategy
        >>> strategy = AuditingStrategy(
        ...     FedAvg(),
        ...     torch.nn.Linear(4, 3),
        ...     LocalTraining(epochs=1, batch_size=8, lr=0.1),
        ...     sample_shape=(4,),
        ... )
    """

    def __init__(
        self,
        strategy: Strategy,
        network: Network,
        training: LocalTraining,
        *,
        audit: UpdateAudit | None = None,
        sample_shape: Sequence[int] | None = None,
        samples: KnownSamples | None = None,
        directory: str | Path = "leakwatch-flower/server",
        class_names: Sequence[str] | None = None,
        weighted_by_key: str = "num-examples",
    ) -> None:
        super().__init__()
        if not isinstance(strategy, Strategy):
            raise TypeError(
                f"strategy must be one of flwr.serverapp.strategy, got {strategy!r}."
            )
        if not isinstance(training, LocalTraining):
            raise TypeError(
                f"training must be a LocalTraining, got {training!r}; for instance "
                f"LocalTraining(epochs=1, batch_size=10, lr=0.01)."
            )
        check_function(
            "samples", samples, "samples(client) that returns samples and labels"
        )
        audit = UpdateAudit() if audit is None else audit
        if not isinstance(audit, UpdateAudit):
            raise TypeError(
                f"audit must be an UpdateAudit or None, got a {type(audit).__name__}."
            )
        if audit.plan.attack is None:
            raise ValueError(
                "the audit has no attack, and a server has nothing else; give "
                "UpdateAudit(attack='sme')."
            )
        if sample_shape is None and samples is None:
            raise ValueError(
                "sample_shape is needed to attack without the samples; for instance "
                "sample_shape=(1, 28, 28)."
            )
        self.strategy = strategy
        self.network = network_of(network)
        self.training = training
        self.audit = audit
        self.sample_shape = None if sample_shape is None else tuple(sample_shape)
        self.samples = samples
        self.directory = Path(directory)
        self.class_names = None if class_names is None else tuple(class_names)
        self.weighted_by_key = weighted_by_key
        self._sent: ArrayRecord | None = None
        self._names: dict[int, int] = {}
        self._watched: list[int] = []
        self._known: dict[int, Known] = {}
        self._run = ""

    # -- Flower's interface ----------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Keeps the weights that are sent; the rest is the wrapped strategy's."""
        self._sent = arrays
        messages: Iterable[Message] = self.strategy.configure_train(
            server_round, arrays, config, grid
        )
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Audits the replies; the rest is the wrapped strategy's."""
        arrived = list(replies)
        if self.audit.should_probe(server_round, server_round):
            try:
                self._audit(server_round, arrived)
            except Exception as error:
                say(f"round {server_round} was not audited: {describe_error(error)}")
        arrays: ArrayRecord | None
        metrics: MetricRecord | None
        arrays, metrics = self.strategy.aggregate_train(server_round, arrived)
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's."""
        messages: Iterable[Message] = self.strategy.configure_evaluate(
            server_round, arrays, config, grid
        )
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The wrapped strategy's."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """The wrapped strategy's."""
        self.strategy.summary()

    # -- what arrived ----------------------------------------------------------------

    @property
    def run_directory(self) -> Path:
        """Where ledger and report of this run are."""
        return self.directory / self._run

    def _audit(self, server_round: int, replies: Sequence[Message]) -> None:
        if self._sent is None:
            raise RuntimeError("no weights were sent in this round.")
        if replies:
            self._run = f"run-{replies[0].metadata.run_id}"
        arrived = {
            self._number_of(reply): reply
            for reply in replies
            if reply.has_content() and len(reply.content.array_records) == 1
        }
        before = state_of(self.network, self._sent)
        clients = self._chosen(sorted(arrived))
        if not clients:
            return
        self.network.load_state_dict(before)
        if self.samples is not None:
            self._with_truth(server_round, clients, arrived, before)
            return
        rows: list[Row] = []
        pictures: list[tuple[int, UpdateReconstruction]] = []
        shares = TimeShares(self.audit.plan.time_limit, len(clients))
        for client in clients:
            with shares.next() as seconds:
                found = self._attacked(
                    client, arrived[client], before, server_round, seconds
                )
            rows += found[0]
            if found[1] is not None:
                pictures.append((client, found[1]))
        self._record(rows, pictures, server_round)

    def _number_of(self, reply: Message) -> int:
        own = reply.content.config_records.get(RECORD) if reply.has_content() else None
        if own is not None and "client" in own:
            return int(own["client"])
        return self._names.setdefault(reply.metadata.src_node_id, len(self._names))

    def _chosen(self, answered: Sequence[int]) -> list[int]:
        wanted = self.audit.clients
        for client in answered:
            chosen = (
                len(self._watched) < wanted
                if isinstance(wanted, int)
                else client in wanted
            )
            if chosen and client not in self._watched:
                self._watched.append(client)
        return [client for client in answered if client in self._watched]

    def _with_truth(
        self,
        server_round: int,
        clients: Sequence[int],
        arrived: dict[int, Message],
        before: dict[str, Tensor],
    ) -> None:
        updates: list[ClientUpdate] = []
        for client in clients:
            x, y, _ = self._known_of(client)
            updates.append(
                client_update(
                    self.network,
                    before,
                    state_of(self.network, arrays_in(arrived[client].content)),
                    (x, y),
                    training=self.training,
                    client=client,
                    round=server_round,
                )
            )
        record = UpdateRecord(
            self.audit, self.run_directory, self._run, self.class_names
        )
        record.measure(self.network, updates, self._known, report=self.audit.report)

    def _known_of(self, client: int) -> Known:
        assert self.samples is not None
        if client not in self._known:
            x, y = self.samples(client)
            # Samples of two clients must not have one name.
            names = range(client * 10**6, client * 10**6 + len(x))
            self._known[client] = Known(x.detach().cpu(), y.cpu(), names)
        return self._known[client]

    # -- without the truth -----------------------------------------------------------

    def _attacked(
        self,
        client: int,
        reply: Message,
        before: dict[str, Tensor],
        epoch: int,
        seconds: float | None,
    ) -> tuple[list[Row], UpdateReconstruction | None]:
        """Rows of one client; an error becomes their status."""
        names = ("loss", "alpha", "seconds")
        try:
            result = self._inverted(client, reply, before, seconds)
        except Exception as error:
            why = f"failed: {describe_error(error)}"
            say(f"the update of client {client} was not attacked: {why[8:]}")
            return [
                _row(epoch, client, name, float("nan"), why) for name in names
            ], None
        status = str(result.status[0])
        rows = [
            _row(epoch, client, "loss", float(result.loss[0]), status),
            _row(epoch, client, "seconds", result.seconds),
        ]
        alpha = float(result.alpha[0])
        if alpha == alpha:  # attacks that simulate training have none
            rows.append(_row(epoch, client, "alpha", alpha, status))
        matched = float(result.status[0].usable)
        return [*rows, _row(epoch, client, "matched", matched)], result

    def _inverted(
        self,
        client: int,
        reply: Message,
        before: dict[str, Tensor],
        seconds: float | None,
    ) -> UpdateReconstruction:
        plan, audit = self.audit.plan, self.audit
        assert plan.attack is not None
        assert self.sample_shape is not None
        after = state_of(self.network, arrays_in(reply.content))
        update = WeightUpdate(
            initial=flat(self.network, before),
            final=flat(self.network, after)[None],
            labels=None,
            sample_shape=self.sample_shape,
            samples=self._samples_of(reply),
            training=self.training,
            index=(client,),
        )
        return plan.attack.run(
            GradientMap(self.network, audit.criterion, dtype=audit.scoring.dtype),
            update,
            pixels=PixelScale.of(audit.mean, audit.std, audit.data_range),
            start=Start(plan.start),
            seed=plan.seed,
            restarts=plan.restarts,
            time_limit=seconds,
        )

    def _samples_of(self, reply: Message) -> int:
        for metrics in reply.content.metric_records.values():
            if self.weighted_by_key in metrics:
                return int(metrics[self.weighted_by_key])
        raise ValueError(
            f"the client does not say how many samples it has: there is no "
            f"{self.weighted_by_key!r} in its MetricRecord."
        )

    def _record(
        self,
        rows: Sequence[Row],
        found: Sequence[tuple[int, UpdateReconstruction]],
        epoch: int,
    ) -> None:
        ledger = RiskLedger(self.run_directory, run=self._run)
        described = describe_clients(self._watched)
        self.audit.watch(dict.fromkeys(self._watched, ()))
        ledger.write_metadata(
            {
                "message": UPDATE.name,
                "class_names": self.class_names,
                "model_name": type(self.network).__name__,
                "quantities": {
                    name: {
                        "unit": q.unit,
                        "direction": q.direction,
                        "meaning": q.meaning,
                        "source": q.source,
                    }
                    for name, q in described.items()
                },
                "config": {**self.audit.settled(), "framework": "flower"},
            }
        )
        ledger.append(rows, attacks=self._pictures(found, epoch))
        if self.audit.report:
            try:
                write_report(ledger.directory)
            except ModuleNotFoundError as error:
                say(f"there is no report: {error}")

    def _pictures(
        self, found: Sequence[tuple[int, UpdateReconstruction]], epoch: int
    ) -> dict[str, Any] | None:
        scale = PixelScale.of(self.audit.mean, self.audit.std, self.audit.data_range)
        shown: list[Tensor] = []
        samples: list[int] = []
        labels: list[int] = []
        for client, result in found:
            images = scale.to_pixels(result.images[0].cpu().double())
            if images.ndim != 4 or images.shape[1] not in (1, 3):
                return None
            top = self.audit.data_range or 1.0
            shown.append((images / top * 255).round().clamp(0, 255))
            samples += range(client * 10**6, client * 10**6 + len(images))
            labels += result.labels[0].tolist()
        if not shown:
            return None
        pixels = torch.cat(shown).permute(0, 2, 3, 1).to(torch.uint8).numpy()
        return {
            "random": pixels,
            "sample": np.array(samples),
            "class": np.array(labels),
            "epoch": epoch,
            "step": epoch,
        }


def _row(epoch: int, client: int, name: str, value: float, status: str = "ok") -> Row:
    quantity = f"update/client-{client}/{name}"
    return Row(epoch, epoch, None, None, quantity, value, status)
