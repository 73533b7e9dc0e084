"""The network's weights in Flower's messages, in the order that leakwatch knows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TypeAlias, cast

import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn

from leakwatch.federated import ClientUpdate
from leakwatch.weight_update import LocalTraining

__all__ = ["Network", "arrays_in", "client_update", "flat", "network_of", "state_of"]

Network: TypeAlias = nn.Module | Callable[[], nn.Module]
"""The network that clients train, or what makes one; its own weights don't count."""


def network_of(network: Network) -> nn.Module:
    """A network of one's own.

    Args:
        network: copied, or called.

    Raises:
        TypeError: for what is no network and makes none.
    """
    made: object = (
        copy.deepcopy(network) if isinstance(network, nn.Module) else network()
    )
    if not isinstance(made, nn.Module):
        raise TypeError(
            f"network must be a torch.nn.Module or a function that makes one, got "
            f"{network!r}, which made a {type(made).__name__}."
        )
    return made


def arrays_in(content: RecordDict) -> ArrayRecord:
    """The only weights of a message.

    Args:
        content: of the message.

    Raises:
        ValueError: for none, or several.
    """
    records = list(content.array_records.values())
    if len(records) != 1:
        raise ValueError(
            f"a message must hold one ArrayRecord, the weights, but this one holds "
            f"{len(records)}."
        )
    return cast(ArrayRecord, records[0])


def state_of(module: nn.Module, arrays: ArrayRecord) -> dict[str, Tensor]:
    """What a record holds, by the network's names.

    By name where the record has the network's names, else by position, as records made
    of a list of arrays are.

    Args:
        module: the network.
        arrays: of a message.

    Raises:
        ValueError: for arrays that are not those of the network.
    """
    own = module.state_dict()
    sent = {name: _tensor(arrays[name].numpy()) for name in arrays}
    if sent.keys() != own.keys():
        if len(sent) != len(own) or not all(name.isdigit() for name in sent):
            raise ValueError(
                f"the message holds {_some(sent)}, the network {_some(own)}; give "
                f"network= the one that clients train, and send its state_dict()."
            )
        sent = dict(zip(own, sent.values(), strict=True))
    for name, value in sent.items():
        if value.shape != own[name].shape:
            raise ValueError(
                f"{name} has the shape {tuple(value.shape)} in the message, and "
                f"{tuple(own[name].shape)} in the network."
            )
    return {name: value.to(own[name].dtype) for name, value in sent.items()}


def flat(module: nn.Module, state: Mapping[str, Tensor]) -> Tensor:
    """The trained weights as one vector, in the order of the gradient map.

    Args:
        module: the network.
        state: its weights by name.
    """
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    return torch.cat([state[name].reshape(-1) for name in names])


def client_update(
    module: nn.Module,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    samples: tuple[Tensor, Tensor],
    *,
    training: LocalTraining,
    client: int,
    round: int,
) -> ClientUpdate:
    """What a client did in one round, as the rest of leakwatch knows it.

    Args:
        module: the network.
        before: weights and buffers that the server sent.
        after: what the client sent back.
        samples: its samples and labels.
        training: its local training.
        client: its number.
        round: of communication.
    """
    x, y = samples
    buffers = [name for name, _ in module.named_buffers() if name in before]
    return ClientUpdate(
        initial=flat(module, before),
        final=flat(module, after),
        x=x,
        y=y,
        training=training,
        client=client,
        round=round,
        losses=torch.full((training.steps(len(x)),), torch.nan),
        initial_buffers={name: before[name] for name in buffers},
        buffers={name: after[name] for name in buffers},
    )


def _tensor(array: object) -> Tensor:
    # Flower's arrays are read-only views of bytes.
    return torch.tensor(array)


def _some(names: Mapping[str, object]) -> str:
    shown = ", ".join(list(names)[:3])
    return f"{len(names)} arrays ({shown}{', …' if len(names) > 3 else ''})"
