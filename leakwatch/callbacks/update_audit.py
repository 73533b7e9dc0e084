"""UpdateAudit: what the weights that federated clients send back give away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from lightning.pytorch import LightningModule, Trainer

from leakwatch.attacks import UpdateAttack
from leakwatch.attacks.updates import presets
from leakwatch.callbacks._audit.conclusions import conclusions, sentence
from leakwatch.callbacks._audit.plan import (
    METRICS,
    Federated,
    Kind,
    UpdatePlan,
    chosen_attack,
)
from leakwatch.callbacks._audit.quantities import (
    describe_attacks,
    describe_clients,
    describe_update_scores,
)
from leakwatch.callbacks._audit.updates import (
    audit_round,
    check_clients,
    chosen_clients,
)
from leakwatch.callbacks._probing.options import (
    RecordOptions,
    check_options,
    with_options_of,
)
from leakwatch.callbacks._probing.step import ProbeStep, Share
from leakwatch.callbacks._probing.training_probes import (
    SampleSource,
    only_loader,
    training_probes,
)
from leakwatch.callbacks.probe_callback import RecordingCallback
from leakwatch.checks import check_classes, check_flag, check_integer, check_number
from leakwatch.probes import ProbeSet
from leakwatch.quality import check_metrics
from leakwatch.reporting import Quantity, Row
from leakwatch.reporting.message import UPDATE
from leakwatch.scores.updates.api import scores_of_updates
from leakwatch.scores.updates.client import Effort

__all__ = ["UpdateAudit"]


class UpdateAudit(RecordingCallback):
    """Attacks the updates of chosen clients every R communication rounds.

    For :class:`leakwatch.models.FedAvgModule`, or any module that keeps its
    ``last_round`` and trains on a data set with ``parts``, the positions of each
    client's samples. After an audited round the updates w_0 − w_T that the watched
    clients really sent are inverted, all those with equally many samples at once, and
    scored without attack (:func:`leakwatch.score_update`). A watched client that did
    not answer in that round shared nothing and gets no values.

    Recorded for every sample, after optimal assignment of the reconstructions:
    quality, verdict, baselines and scores under the names of
    :class:`leakwatch.callbacks.InversionAudit` (kind of start: ``random``), and the
    rank correlations of the scores with what the attack achieved. For every client
    ``update/client-<number>/…``: mean PSNR, α, the loss 1 − cos, seconds, and α,
    similarity and mismatch of the surrogate at the true samples.

    Training is left alone, failures become statuses, pictures stay on local disk.

    Args:
        clients: numbers of the clients to watch, or how many to draw before training.
        attack: a preset such as ``"sme"`` or ``"ig-update"``, or an attack object;
            ``None`` for scores alone.
        steps: of the attack; default: the preset's.
        restarts: of the attack; default: the preset's.
        labels: whether the server knows how many samples of each class a client has.
        training: whether the server knows the clients' local training.
        scores: names or groups of scores, see :func:`leakwatch.score_update`.
        blocks: whether to score each sample as if the others were known.
        joint: whether to score a client's samples together.
        metrics: of quality, as in :class:`leakwatch.callbacks.InversionAudit`.
        time_limit: seconds for the attacks of one audit on all clients together;
            ``None`` for no limit. Scores and quality take their time on top.
        every_n_epochs: how often, in communication rounds, each of which is an epoch;
            for other schedules override ``should_probe``.
        noise_std: s of the Bayesian scores; default: the mismatch's energy per
            coordinate, of each client.
        epsilon: as in :class:`leakwatch.callbacks.LeakageMonitor`, like all that
            follow.
        prior_std: of the scores.
        data_range: peak of the PSNR.
        mean: of the normalisation.
        std: of the normalisation.
        criterion: one loss per sample.
        dtype: of scores and attacks.
        max_memory: MiB for a Jacobian.
        products: most products with J for each matrix-free task.
        seed: of the drawing of clients, and of the attack's starts.
        directory: of the ledger and the report.
        report: write ``report.html`` when training ends.
        live: as in the monitor.
        log_images: send originals and reconstructions to remote loggers.
        verbose: print a line after each audit.
        name: first part of all log keys, and of the directory.

    Raises:
        TypeError: for arguments of the wrong kind; in ``fit``, for a module or data
            that know no clients.
        ValueError: for values out of range; unknown attacks, scores or metrics; in
            ``fit``, for clients that there are not.
        RuntimeError: as the monitor.

    Example:
        >>> from leakwatch.callbacks import UpdateAudit
        >>> audit = UpdateAudit(clients=[0, 3], attack="sme", steps=300,
        ...                     every_n_epochs=10)
    """

    message = UPDATE
    resolve_scores = staticmethod(scores_of_updates)

    @with_options_of(RecordingCallback)
    def __init__(
        self,
        clients: Sequence[int] | int = 2,
        attack: str | UpdateAttack | Any | None = "sme",
        *,
        steps: int | None = None,
        restarts: int | None = None,
        labels: bool = True,
        training: bool = True,
        scores: Sequence[str] = ("lavp", "i2f"),
        blocks: bool = True,
        joint: bool = True,
        metrics: Sequence[str] = METRICS,
        time_limit: float | None = None,
        noise_std: float | None = None,
        products: int = 150,
        name: str = "leakwatch-update",
        **options: Unpack[RecordOptions],
    ) -> None:
        check_options(self, options)
        super().__init__(
            scores, noise_std=noise_std, products=products, name=name, **options
        )
        self.clients = check_clients(clients)
        chosen = None
        if attack is not None:
            chosen = chosen_attack(
                "attack", attack, steps, presets.get, example="sme", optional=True
            )
        effort = Effort(
            check_flag("blocks", blocks),
            check_flag("joint", joint),
            self.max_memory,
            self.products,
        )
        if not (blocks or joint):
            raise ValueError(
                "blocks and joint are both False, so there is no score to compare "
                "with; set joint=True."
            )
        if restarts is not None:
            restarts = check_integer("restarts", restarts, example=3)
        if time_limit is not None:
            time_limit = check_number("time_limit", time_limit, example=60.0)
        self.plan = UpdatePlan(
            attack=None if chosen is None else chosen.attack,
            start="normal" if chosen is None else chosen.start,
            restarts=restarts or (1 if chosen is None else chosen.restarts),
            labels=check_flag("labels", labels),
            training=check_flag("training", training),
            scores=tuple(self.scores),
            metrics=check_metrics(metrics),
            effort=effort,
            time_limit=time_limit,
            seed=self.seed,
        )
        self._members: dict[int, list[int]] = {}

    # -- before training -------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses what can't work, as early as it can be known.

        Raises:
            TypeError: for a module that keeps no rounds.
        """
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and not isinstance(pl_module, Federated):
            raise TypeError(
                f"UpdateAudit audits the weights that clients send, but "
                f"{type(pl_module).__name__} keeps no last_round; use "
                f"leakwatch.models.FedAvgModule, or InversionAudit for gradients."
            )

    def draw(
        self, source: SampleSource, indices: Sequence[int] | None = None
    ) -> ProbeSet:
        """Chooses the clients; watched are the samples that these hold now.

        Args:
            source: the data of the run.
            indices: of no use: clients and seed say which samples.

        Raises:
            TypeError: for data that know no clients.
            ValueError: for clients that there are not, or targets that are no class
                indices.
        """
        caller = type(self).__name__
        self._members = chosen_clients(
            only_loader(source, caller).dataset, self.clients, self.seed
        )
        probes = training_probes(
            source,
            caller=caller,
            n=1,
            seed=self.seed,
            mean=self.mean,
            std=self.std,
            data_range=self.data_range,
            indices=[i for part in self._members.values() for i in part],
        )
        check_classes(probes.y, caller)
        return probes

    def watch(self, members: Mapping[int, Sequence[int]]) -> None:
        """Says whom to watch where no Trainer draws them.

        Args:
            members: client → indices of its samples, in the order in which it holds
                them.
        """
        self._members = {client: list(part) for client, part in members.items()}

    @property
    def watched(self) -> tuple[int, ...]:
        """Numbers of the clients watched; empty before training."""
        return tuple(self._members)

    # -- what is measured ------------------------------------------------------------

    def measure(self, step: ProbeStep) -> Share:
        """Attacks and scores the watched clients; raises no error."""
        return Share() if step.rank else audit_round(step, self.plan, self._members)

    def conclude(self, rows: Sequence[Row], epoch: int, step: int) -> list[Row]:
        """Shares of recovered samples, and correlations with the scores."""
        predictors = [*self.plan.score_names, "image_std", "image_tv"]
        return conclusions(
            rows, predictors, self._kinds, self.plan.metrics, epoch=epoch, step=step
        )

    def describe(self) -> dict[str, Quantity]:
        """Unit, direction, meaning and source of each quantity."""
        attacked = describe_attacks(
            self._attacks,
            self.plan.metrics,
            "1 − cos between the client's update and what the reconstruction explains",
            self.message,
        )
        return {
            **describe_update_scores(self.scores),
            **attacked,
            **describe_clients(self._members),
        }

    def sentence(self, rows: Sequence[Row]) -> str | None:
        """What the attacks achieved, in one line."""
        return sentence(rows, self._kinds) if self._kinds else None

    def arguments(self) -> dict[str, Any]:
        """All that changes what is measured."""
        return super().arguments() | {"plan": self.plan, "clients": self.clients}

    def settled(self) -> dict[str, Any]:
        """The arguments that the record of a run states."""
        plan = self.plan
        return super().settled() | {
            "clients": list(self._members),
            "attacks": self._attacks,
            "metrics": list(plan.metrics),
            "restarts": plan.restarts,
            "labels_known": plan.labels,
            "training_known": plan.training,
        }

    @property
    def _attacks(self) -> dict[Kind, str]:
        """Kind of start → name of the attack."""
        return {} if self.plan.attack is None else {"random": self.plan.attack.name}

    @property
    def _kinds(self) -> list[Kind]:
        return list(self._attacks)
