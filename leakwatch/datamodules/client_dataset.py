"""The samples of all clients of a federation, and those of one round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeAlias, final, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from leakwatch.datamodules.dataset import ImageDataset
from leakwatch.datamodules.files import ImageFileDataset
from leakwatch.derivatives.runtime.rng_and_precision import isolated_rng
from leakwatch.federated import Answering, ClientData, Partition, answering_clients
from leakwatch.federated.streams import client_seed

_Item: TypeAlias = tuple[Tensor, int, int]

# Names the stream of a client's reading beside those of its training.
_READING = 2


@final
class ClientDataset(Dataset[tuple[Tensor, int, int]]):
    """The samples of all clients, as (input, label, client).

    Samples that belong to no client are not in it; the others keep their order.

    A batch of :class:`RoundSampler` is read client by client, each with the global
    random streams (Torch's, NumPy's, Python's) seeded by seed, round and client, and
    put back afterwards. So what augmentation draws is the same after a resume, in any
    number of workers, and whoever else answers.

    Args:
        dataset: gives (input, label) and has ``targets``.
        partition: indices of each client's samples in ``dataset``.
        seed: of what is drawn while a round is read, at least 0.

    Attributes:
        indices: of the samples in ``dataset``, (n,).
        targets: their labels, (n,).
        owners: their clients, (n,).
        parts: positions of each client's samples in this data set.
    """

    def __init__(
        self,
        dataset: ImageDataset | ImageFileDataset,
        partition: Partition,
        seed: int = 0,
    ) -> None:
        client_seed(seed)  # raises early
        clients = torch.cat(
            [torch.full_like(part, i) for i, part in enumerate(partition)]
        )
        self.indices, order = torch.cat(partition).sort()
        self.owners: Int[Tensor, " n"] = clients[order]
        self.targets: Int[Tensor, " n"] = dataset.targets[self.indices]
        self.parts: Partition = tuple(
            (self.owners == i).nonzero().flatten() for i in range(len(partition))
        )
        self._dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(
        self, index: int
    ) -> tuple[Float[Tensor, "channels height width"], int, int]:
        x, y = self._dataset[int(self.indices[index])]
        return x, y, int(self.owners[index])

    def __getitems__(
        self, indices: Sequence[int]
    ) -> list[tuple[Float[Tensor, "channels height width"], int, int]]:
        """Read one batch, as ``torch.utils.data.DataLoader`` asks for it.

        Args:
            indices: of a round; any others are read one by one, from the streams as
                they stand.
        """
        if not isinstance(indices, RoundIndices):
            return [self[i] for i in indices]
        items: list[_Item] = []
        for client, own in groupby(indices, key=lambda i: int(self.owners[i])):
            place = (indices.round, client, _READING)
            with isolated_rng(client_seed(self._seed, *place)):
                items += [self[i] for i in own]
        return items


@final
class Clients(Sequence[ClientData]):
    """Samples and labels of one client after the other, read when asked for.

    Args:
        dataset: of all clients.
    """

    def __init__(self, dataset: ClientDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset.parts)

    @overload
    def __getitem__(self, index: int) -> ClientData: ...
    @overload
    def __getitem__(self, index: slice) -> list[ClientData]: ...
    def __getitem__(self, index: int | slice) -> ClientData | list[ClientData]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        items = [self._dataset[i] for i in self._dataset.parts[index].tolist()]
        return torch.stack([x for x, _, _ in items]), torch.tensor(
            [y for _, y, _ in items]
        )


@final
class RoundIndices(list[int]):
    """Positions of a round's samples, client by client.

    Args:
        positions: in a :class:`ClientDataset`.
        round: the communication round.
    """

    def __init__(self, positions: Sequence[int] = (), round: int = 0) -> None:
        super().__init__(positions)
        self.round = round


@final
class RoundSampler(Sampler[list[int]]):
    """One batch per epoch: all samples of the clients that answer in that round.

    A batch sampler for :class:`ClientDataset`. Who answers depends on seed and epoch
    only, so that a resumed run asks whom an uninterrupted one would have asked.

    Args:
        parts: positions of each client's samples.
        share: of the clients that answer, in (0, 1].
        answering: see :func:`leakwatch.federated.answering_clients`.
        seed: of the drawing, at least 0.

    Raises:
        ValueError: for an argument out of range.

    Example:
        >>> sampler = RoundSampler([torch.tensor([0, 2]), torch.tensor([1, 3])])
        >>> list(sampler)
        [[0, 2, 1, 3]]
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        share: float = 1.0,
        answering: Answering = "count",
        seed: int = 0,
    ) -> None:
        answering_clients(len(parts), share, answering=answering, seed=seed)
        self._parts = parts
        self._share = share
        self._answering: Answering = answering
        self._seed = seed
        self._round = 0

    @property
    def sampler(self) -> RoundSampler:
        """Itself: where Lightning looks for ``set_epoch`` of a batch sampler."""
        return self

    @property
    def indices(self) -> list[int]:
        """All positions that some round may ask for."""
        return [i for part in self._parts for i in part.tolist()]

    def set_epoch(self, epoch: int) -> None:
        """Tell which round comes next."""
        self._round = epoch

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[list[int]]:
        chosen = answering_clients(
            len(self._parts),
            self._share,
            answering=self._answering,
            round=self._round,
            seed=self._seed,
        )
        positions = [i for client in chosen for i in self._parts[client].tolist()]
        yield RoundIndices(positions, self._round)
