"""The client's part: an update is scored before it leaves, and may be held back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, final, get_args

from flwr.app import (
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    RecordDict,
)
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.callbacks import UpdateAudit
from leakwatch.checks import check_choice, check_function, check_number, check_samples
from leakwatch.integrations.flower.recording import Known, UpdateRecord, say
from leakwatch.integrations.flower.weights import (
    Network,
    arrays_in,
    client_update,
    network_of,
    state_of,
)
from leakwatch.reporting.statistics.gate import Limits
from leakwatch.status import describe_error
from leakwatch.weight_update import LocalTraining

__all__ = ["HELD_BACK", "Action", "ClientSamples", "LeakageMod"]

Action: TypeAlias = Literal["hold", "warn"]
"""What becomes of an update that exposes too much."""

ClientSamples: TypeAlias = Callable[
    [Context], tuple[Float[Tensor, "N ..."], Int[Tensor, " N"]]
]
"""All samples that a client trains on, as the network takes them, and their labels."""

#: Code of the error that a server gets in place of an update; Flower's own are below.
HELD_BACK = 725

#: Name of the record that says whose update this is.
RECORD = "leakwatch"


@final
class LeakageMod:
    """Scores the update that is about to leave, and can hold it back.

    A mod of Flower's ``ClientApp``. After local training it compares the weights that
    came with those that are about to go, and predicts how well each sample could be
    rebuilt from the difference (:func:`leakwatch.score_update`). Scores stay with the
    client: in a ledger under ``directory``, of which ``leakwatch report`` makes a page.
    Neither images nor scores reach the server.

    Mods act from the last to the first on the way out. Put this one first, and it sees
    what really leaves, noise of a mod after it included.

    With ``max_psnr`` an update above it does not leave: the server gets an error in its
    place, which says no more than that, and Flower goes on with the other clients. The
    same if the score could not be computed, for unknown is not safe.

    Args:
        network: that clients train, or a function that makes one.
        samples: ``samples(context)`` → all samples that this client trains on, and
            their labels.
        training: the local training: epochs, batch size, learning rate.
        audit: what is measured, and how: scores, normalisation, prior. Default: scores
            alone, no attack; with one the client attacks itself.
        max_psnr: dB that no sample may exceed, predicted or achieved by an audit's
            attack; ``None``: everything leaves.
        share: of samples that may exceed it all the same, in [0, 1).
        action: ``"hold"``: an update above the limit does not leave; ``"warn"``: it
            does, with a line in the client's log.
        directory: of the clients' ledgers, each in a folder of its own.
        class_names: of the labels.
        report: whether to rewrite the page after every round; takes seconds.

    Raises:
        TypeError: for arguments of the wrong kind.
        ValueError: for values out of range.

    Example:
        >>> import torch
        >>> from flwr.clientapp import ClientApp
        >>> from leakwatch import LocalTraining
        >>> from leakwatch.integrations.flower import LeakageMod
        >>> mod = LeakageMod(
        ...     torch.nn.Linear(4, 3),
        ...     lambda context: (torch.rand(8, 4), torch.arange(8) % 3),
        ...     LocalTraining(epochs=1, batch_size=8, lr=0.1),
        ...     max_psnr=25,
        ... )
        >>> app = ClientApp(mods=[mod])
    """

    def __init__(
        self,
        network: Network,
        samples: ClientSamples,
        training: LocalTraining,
        *,
        audit: UpdateAudit | None = None,
        max_psnr: float | None = None,
        share: float = 0.0,
        action: Action = "hold",
        directory: str | Path = "leakwatch-flower",
        class_names: Sequence[str] | None = None,
        report: bool = False,
    ) -> None:
        network_of(network)
        check_function(
            "samples", samples, "samples(context) that returns samples and labels"
        )
        if not isinstance(training, LocalTraining):
            raise TypeError(
                f"training must be a LocalTraining, got {training!r}; for instance "
                f"LocalTraining(epochs=1, batch_size=10, lr=0.01)."
            )
        if not isinstance(audit, UpdateAudit | None):
            raise TypeError(
                f"audit must be an UpdateAudit or None, got a {type(audit).__name__}."
            )
        check_choice("action", action, get_args(Action))
        if max_psnr is not None:
            check_number("max_psnr", max_psnr, "(-inf, inf)", example=25)
        self.network = network
        self.samples = samples
        self.training = training
        self.audit = UpdateAudit(attack=None) if audit is None else audit
        self.limits = Limits(
            max_psnr=max_psnr, share=check_number("share", share, "[0, 1)", example=0.1)
        )
        self.action: Action = action
        self.directory = Path(directory)
        self.class_names = None if class_names is None else tuple(class_names)
        self.report = report

    def __call__(
        self,
        msg: Message,
        ctxt: Context,
        call_next: Callable[[Message, Context], Message],
    ) -> Message:
        """Lets the client train, and decides about what it made.

        Args:
            msg: from the server.
            ctxt: of the client.
            call_next: the mods after this one, and the client.

        Returns:
            Its reply, or an error in its place.
        """
        # Read before: a client may train the arrays of the message in place.
        training = msg.metadata.message_type.split(".")[0] == MessageType.TRAIN
        sent = copy.deepcopy(msg.content) if training and msg.has_content() else None
        reply = call_next(msg, ctxt)
        if sent is None or reply.has_error():
            return reply
        client = number_of(ctxt)
        try:
            broken = self._judged(sent, reply, ctxt, client)
        except Exception as error:
            broken = [f"it could not be scored: {describe_error(error)}"]
            say(f"the update of client {client} {broken[0].removeprefix('it ')}")
        if self.limits.any and broken:
            say(f"the update of client {client}: {'; '.join(broken)}")
            if self.action == "hold":
                why = "held back by the client: it exposes more than the client allows"
                return Message(Error(HELD_BACK, why), reply_to=msg)
        reply.content[RECORD] = ConfigRecord({"client": client})
        return reply

    def _judged(
        self, sent: RecordDict, reply: Message, ctxt: Context, client: int
    ) -> list[str]:
        module = network_of(self.network)
        x, y = self.samples(ctxt)
        check_samples(x, y)
        before = state_of(module, arrays_in(sent))
        module.load_state_dict(before)
        update = client_update(
            module,
            before,
            state_of(module, arrays_in(reply.content)),
            (x.detach().cpu(), y.cpu()),
            training=self.training,
            client=client,
            round=round_of(sent),
        )
        record = UpdateRecord(
            self.audit,
            self.directory / f"run-{ctxt.run_id}" / f"client-{client}",
            f"client {client}",
            self.class_names,
        )
        known = {client: Known(update.x, update.y, range(len(x)))}
        rows = record.measure(module, [update], known, report=self.report)
        return self.limits.broken(rows, self.audit.describe(), self.class_names)


def number_of(context: Context) -> int:
    """What a client is called: its partition in a simulation, else its node.

    Args:
        context: of the client.
    """
    return int(context.node_config.get("partition-id", context.node_id))


def round_of(content: RecordDict) -> int:
    """The round that a server's message belongs to, from 1; 0 if it doesn't say.

    Args:
        content: of the message.
    """
    for config in content.config_records.values():
        if "server-round" in config:
            return int(config["server-round"])
    return 0
