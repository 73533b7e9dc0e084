"""Any data module, split into the clients of a federation."""

from __future__ import annotations

from typing import Any, Literal, final, get_args

import lightning as L
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader

from leakwatch.checks import check_choice, check_integer, check_number
from leakwatch.datamodules.base import ImageDataModule
from leakwatch.datamodules.client_dataset import ClientDataset, Clients, RoundSampler
from leakwatch.datamodules.dataset import ImageDataset
from leakwatch.datamodules.files import ImageFileDataset
from leakwatch.federated import (
    Answering,
    Partition,
    answering_clients,
    dirichlet_split,
    fixed_split,
    group_split,
    iid_split,
)

Split = Literal["iid", "dirichlet", "fixed", "group"]


@final
class ClientsDataModule(L.LightningDataModule):
    """Splits the training data of another data module into clients.

    An epoch is a communication round of one batch, with the samples of the clients
    that answer; ``leakwatch.models.FedAvgModule`` trains on it. Validation and test
    data stay with the server.

    Args:
        data: where the samples come from.
        split: "iid": evenly at random; "dirichlet": another mixture of classes for
            each client; "fixed": `per_client` samples each, at random; "group": one
            client per group, such as a writer of FEMNIST.
        clients: how many; None, with "group" only: all groups.
        alpha: of "dirichlet", above 0: small for unequal mixtures.
        per_client: of "fixed": samples of each client.
        least: of "dirichlet" and "group": samples that a client has at least.
        share: of the clients that answer in a round, in (0, 1].
        answering: "count": exactly that share; "chance": each with that probability.
        seed: of the split, of who answers, and of what augmentation draws for each
            client in each round, at least 0.

    Attributes:
        train_dataset: the samples that belong to clients, after `setup`.
        probe_dataset: the same, never augmented.
        clients: samples and labels of each client, without augmentation.

    Raises:
        TypeError: `data` is no `ImageDataModule`, or another argument of the wrong
            kind.
        ValueError: An argument out of range; from `setup`: too few samples or groups.

    Example:
        >>> from leakwatch.datamodules import MNISTSample
        >>> data = ClientsDataModule(MNISTSample(), "dirichlet", clients=20, alpha=0.3)
    """

    def __init__(
        self,
        data: ImageDataModule,
        split: Split = "iid",
        clients: int | None = 10,
        alpha: float = 0.5,
        per_client: int | None = None,
        least: int = 1,
        share: float = 1.0,
        answering: Answering = "count",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(data, ImageDataModule):
            raise TypeError(
                f"data must be an ImageDataModule, such as MNISTSample(), got "
                f"{type(data).__name__}; without one, use "
                f"leakwatch.federated.FederatedAveraging."
            )
        _check_split(split, clients, per_client)
        _check_numbers(clients, alpha, per_client, least)
        number = 1 if clients is None else clients
        answering_clients(number, share, answering=answering, seed=seed)
        self.data = data
        self.split = split
        self.number = clients
        self.alpha = alpha
        self.per_client = per_client
        self.least = least
        self.share = share
        self.answering: Answering = answering
        self.seed = seed
        # What callbacks look for in a data module.
        self.class_names, self.num_classes = data.class_names, data.num_classes
        self.image_shape, self.mean, self.std = data.image_shape, data.mean, data.std
        self.train_dataset: ClientDataset | None = None
        self.probe_dataset: ClientDataset | None = None

    @property
    def clients(self) -> Clients:
        """Samples and labels of each client.

        Raises:
            RuntimeError: Before `setup`.
        """
        return Clients(_ready(self.probe_dataset))

    def prepare_data(self) -> None:
        """Find or fetch the files of `data`."""
        self.data.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Load and split, once; later calls change nothing.

        Args:
            stage: The Trainer's; all splits are made whatever it is.
        """
        if self.train_dataset is not None:
            return
        self.data.setup(stage)
        train, probe = self.data.train_dataset, self.data.probe_dataset
        if train is None or probe is None:
            raise RuntimeError(
                f"{type(self.data).__name__}.setup() left no training data."
            )
        partition = self._partition(train)
        self.train_dataset = ClientDataset(train, partition, self.seed)
        self.probe_dataset = ClientDataset(probe, partition)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, int, int]]:
        """Return one batch per round: samples, labels and clients of those who answer.

        Raises:
            RuntimeError: Before `setup`.
        """
        dataset, workers = _ready(self.train_dataset), self.data.num_workers
        sampler = RoundSampler(dataset.parts, self.share, self.answering, self.seed)
        if self.trainer is not None:
            # Workers ask for their first batch before the Trainer says which round it
            # is; current_epoch is that of the checkpoint at this point.
            # Lightning declares what all its loops count.
            progress: Any = self.trainer.fit_loop.epoch_progress.current
            sampler.set_epoch(progress.processed)
        return DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
        )

    def val_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        """Return the validation batches of `data`."""
        return self.data.val_dataloader()

    def test_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        """Return the test batches of `data`."""
        return self.data.test_dataloader()

    def _partition(self, dataset: ImageDataset | ImageFileDataset) -> Partition:
        n, number, seed = len(dataset), self.number, self.seed
        if self.split == "group":
            return group_split(_groups(dataset), clients=number, least=self.least)
        assert number is not None  # refused by the constructor
        if self.split == "dirichlet":
            return dirichlet_split(
                dataset.targets, number, alpha=self.alpha, least=self.least, seed=seed
            )
        if self.split == "fixed":
            assert self.per_client is not None
            return fixed_split(n, number, self.per_client, seed=seed)
        return iid_split(n, number, seed=seed)


def _check_split(split: str, clients: int | None, per_client: int | None) -> None:
    check_choice("split", split, get_args(Split))
    if clients is None and split != "group":
        raise ValueError(
            f"split={split!r} needs a number of clients, such as clients=10; only "
            f"split='group' knows by itself how many there are."
        )
    if (per_client is not None) != (split == "fixed"):
        raise ValueError(
            f"per_client belongs to split='fixed', such as split='fixed', clients=10, "
            f"per_client=50; got split={split!r} and per_client={per_client!r}."
        )


def _check_numbers(
    clients: int | None, alpha: float, per_client: int | None, least: int
) -> None:
    for name, value in (("clients", clients), ("per_client", per_client)):
        if value is not None:
            check_integer(name, value, example=10)
    check_integer("least", least)
    check_number("alpha", alpha, example=0.5)


def _groups(dataset: ImageDataset | ImageFileDataset) -> Int[Tensor, " n"]:
    groups: Any = getattr(dataset, "groups", None)
    if groups is None:
        raise ValueError(
            "split='group' needs data that knows whose each sample is, such as "
            "FEMNISTDataModule; use 'dirichlet' or 'iid' for this one."
        )
    owners: Int[Tensor, " n"] = groups
    return owners


def _ready(dataset: ClientDataset | None) -> ClientDataset:
    if dataset is None:
        raise RuntimeError(
            "ClientsDataModule is not set up: call prepare_data() and setup(), or pass "
            "it to a Trainer."
        )
    return dataset
