"""One round in the ledger: the same record and report as of a run under Lightning."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from leakwatch.callbacks import UpdateAudit
from leakwatch.callbacks._probing.run import ProbeRun
from leakwatch.callbacks._recording.recorder import Recorder
from leakwatch.callbacks._recording.run_metadata import PastRecord
from leakwatch.federated import ClientUpdate, Round
from leakwatch.probes import ProbeSet
from leakwatch.reporting import RiskLedger, Row

__all__ = ["Known", "UpdateRecord", "say"]

_LOGGER = logging.getLogger("leakwatch.flower")


def say(sentence: str) -> None:
    """Tell whoever reads the log of this process, and stop nothing.

    Args:
        sentence: what happened.
    """
    _LOGGER.warning("leakwatch: %s", sentence)


class Known(NamedTuple):
    """The samples of one client.

    Attributes:
        x: as the network takes them, ``(N, …)``.
        y: their labels.
        names: what they are called.
    """

    x: Tensor
    y: Tensor
    names: Sequence[int]


@final
@dataclass(frozen=True, eq=False)
class UpdateRecord:
    """Measures updates whose samples are known, and writes what it finds.

    Attributes:
        audit: what is measured, and how.
        directory: of the ledger; a round that it has is added to.
        run: its name.
        class_names: of the labels.
    """

    audit: UpdateAudit
    directory: Path
    run: str
    class_names: tuple[str, ...] | None = None

    def measure(
        self,
        module: nn.Module,
        updates: Sequence[ClientUpdate],
        known: Mapping[int, Known],
        *,
        report: bool = False,
    ) -> list[Row]:
        """The rows of one round.

        Args:
            module: the network, with the weights and buffers that the server sent.
            updates: of clients in one round.
            known: what is known of each client of this round and of earlier ones, whose
                pictures and descriptions the record keeps.
            report: whether to write one.

        Raises:
            TypeError: for samples that the network can't take.
            ValueError: the same.
            RuntimeError: for what prevents the measurement of all of them.
        """
        first = updates[0]
        module.last_round = Round(  # type: ignore[assignment]
            first.round, tuple(updates), first.initial, first.initial_buffers
        )
        audit, epoch = self.audit, first.round
        audit.watch({client: of.names for client, of in known.items()})
        probes = ProbeSet.from_tensors(
            torch.cat([of.x for of in known.values()]),
            torch.cat([of.y for of in known.values()]),
            [i for of in known.values() for i in of.names],
            audit.mean,
            audit.std,
            self.class_names,
            data_range=audit.data_range,
        )
        run = ProbeRun(audit, module, probes, lambda _, sentence: say(sentence))
        share = run.measure(epoch, epoch)
        rows = run.rows([share], epoch, epoch)
        recorder = Recorder(
            self.directory,
            self.run,
            self._past(),
            probes,
            run.metadata(defended=False, framework="flower"),
            audit.name,
            lambda _, sentence: say(sentence),
        )
        run.record(recorder, [share], rows)
        recorder.finish([], report=report)
        if share.error:
            raise RuntimeError(share.error)
        return rows

    def _past(self) -> PastRecord | None:
        if not (self.directory / "run.json").is_file():
            return None
        position = RiskLedger(self.directory).position
        return PastRecord(self.run, str(self.directory), position)
