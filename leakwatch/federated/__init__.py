"""Federated averaging: clients, their local training, rounds, and its analysis.

``partition`` divides data among clients, ``local`` trains one of them, ``averaging``
and ``rounds`` are the server's part, ``received`` is what a server sees of it, and
``analysis`` says how much a weight update looks like a gradient.
"""

from __future__ import annotations

from leakwatch.federated.analysis import (
    Segment,
    Subspace,
    principal_subspace,
    segment_similarity,
)
from leakwatch.federated.averaging import Buffers, average_updates
from leakwatch.federated.local import (
    ClientUpdate,
    Record,
    train_client,
)
from leakwatch.federated.partition import (
    Partition,
    dirichlet_split,
    fixed_split,
    group_split,
    iid_split,
)
from leakwatch.federated.received import client_updates
from leakwatch.federated.rounds import (
    Answering,
    ClientData,
    FederatedAveraging,
    Round,
    answering_clients,
)
from leakwatch.weight_update import LocalTraining, WeightUpdate

__all__ = [
    "Answering",
    "Buffers",
    "ClientData",
    "ClientUpdate",
    "FederatedAveraging",
    "LocalTraining",
    "Partition",
    "Record",
    "Round",
    "Segment",
    "Subspace",
    "WeightUpdate",
    "answering_clients",
    "average_updates",
    "client_updates",
    "dirichlet_split",
    "fixed_split",
    "group_split",
    "iid_split",
    "principal_subspace",
    "segment_similarity",
    "train_client",
]
