"""Data modules split into clients."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms import RandomCrop, RandomHorizontalFlip

from leakwatch.datamodules import (
    ArrayDataModule,
    ClientDataset,
    ClientsDataModule,
    FEMNISTDataModule,
    ImageArrays,
    ImageDataset,
    RoundSampler,
)
from leakwatch.federated import (
    answering_clients,
    dirichlet_split,
    fixed_split,
    iid_split,
)
from leakwatch.probes import ProbeSet


@pytest.fixture
def arrays(tmp_path: Path) -> str:
    """100 images; image i is filled with i, its label is i mod 10."""
    index = np.arange(100, dtype=np.uint8)
    images = np.broadcast_to(index[:, None, None], (100, 6, 6))
    path = tmp_path / "images.npz"
    np.savez(path, train_images=images, train_labels=index.astype(np.int64) % 10)
    return str(path)


def ready(path: str, *args: Any, augment: bool = False, **kwargs: Any) -> Any:
    source = ArrayDataModule(path, normalize=False, augment=augment, batch_size=7)
    data = ClientsDataModule(source, *args, **kwargs)
    data.prepare_data()
    data.setup()
    return data


def ids(x: torch.Tensor) -> list[int]:
    return [round(float(image.max()) * 255) for image in x]


@pytest.mark.parametrize("split", ["iid", "dirichlet", "fixed"])
def test_clients_hold_what_the_split_says(arrays: str, split: str) -> None:
    per_client = 9 if split == "fixed" else None
    data = ready(arrays, split, clients=6, alpha=0.4, per_client=per_client, seed=3)
    source = data.data.train_dataset
    expected = {
        "iid": lambda: iid_split(90, 6, seed=3),
        "dirichlet": lambda: dirichlet_split(source.targets, 6, alpha=0.4, seed=3),
        "fixed": lambda: fixed_split(90, 6, 9, seed=3),
    }[split]()
    assert len(data.clients) == 6
    for i, part in enumerate(expected):
        x, y = data.clients[i]
        assert ids(x) == source.images[part, 0, 0, 0].tolist()
        assert torch.equal(y, source.targets[part])
    assert len(data.clients[1:3]) == 2
    used = torch.cat(expected).sort().values
    dataset = data.train_dataset
    assert len(dataset) == len(used) == (54 if split == "fixed" else 90)
    assert torch.equal(dataset.targets, source.targets[used])
    for position in (0, 17, 53):
        x, y, client = dataset[position]
        assert torch.equal(x, source[int(used[position])][0])
        assert y == int(source.targets[used[position]])
        assert int(used[position]) in expected[client].tolist()


def test_an_epoch_is_one_batch_with_the_clients_of_the_round(arrays: str) -> None:
    data = ready(arrays, clients=5, share=0.4, seed=2)
    loader = data.train_dataloader()
    assert len(loader) == 1
    for epoch in (4, 0, 1):
        loader.batch_sampler.set_epoch(epoch)
        ((x, y, clients),) = list(loader)
        chosen = answering_clients(5, 0.4, round=epoch, seed=2)
        assert sorted(set(clients.tolist())) == list(chosen)
        for client in chosen:
            own_x, own_y = data.clients[client]
            assert torch.equal(x[clients == client], own_x)
            assert torch.equal(y[clients == client], own_y)


def test_the_server_keeps_validation_data(arrays: str) -> None:
    data = ready(arrays)
    batch = next(iter(data.val_dataloader()))
    assert len(batch) == 2
    assert len(batch[0]) == 7
    assert (data.num_classes, data.image_shape) == (10, (1, 6, 6))
    with pytest.raises(RuntimeError, match="no test images"):
        data.test_dataloader()


def test_probes_come_from_the_clients_without_augmentation(arrays: str) -> None:
    data = ready(arrays, "fixed", clients=3, per_client=10, augment=True)
    probes = ProbeSet.from_dataset(data.probe_dataset, n=10)
    held = [i for x, _ in data.clients for i in ids(x)]
    for x, y, index in zip(probes.x, probes.y, probes.index, strict=True):
        assert bool((x == x.flatten()[0]).all())
        assert ids(x[None])[0] in held
        assert int(y) == int(data.train_dataset.targets[index])
    torch.manual_seed(0)
    changed = [
        not torch.equal(data.train_dataset[i][0], data.probe_dataset[i][0])
        for i in range(10)
    ]
    assert any(changed)


def test_one_client_per_writer(tmp_path: Path) -> None:
    sizes = {"a": 6, "b": 1, "c": 4}
    users = {
        name: {"x": [[k / 255] * 784] * n, "y": [i % 2 for i in range(n)]}
        for k, (name, n) in enumerate(sizes.items())
    }
    content = {
        "users": list(users),
        "num_samples": list(sizes.values()),
        "user_data": users,
    }
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "all.json").write_text(json.dumps(content))
    source = FEMNISTDataModule(str(tmp_path), normalize=False, val_fraction=0.2)
    data = ClientsDataModule(source, "group", clients=None, least=2)
    data.setup()
    writers = [name for name in source.writers if source.samples_per_writer[name] > 1]
    assert len(data.clients) == len(writers) > 1
    for i, name in enumerate(writers):
        x, _ = data.clients[i]
        assert len(x) == source.samples_per_writer[name]
        assert set(ids(x)) == {"abc".index(name)}


def test_a_second_setup_changes_nothing(arrays: str) -> None:
    data = ready(arrays)
    dataset = data.train_dataset
    data.setup()
    assert data.train_dataset is dataset


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"split": "random"}, "'iid', 'dirichlet', 'fixed', 'group', got 'random'"),
        ({"clients": None}, "needs a number of clients"),
        ({"split": "fixed"}, "per_client belongs to split='fixed'"),
        ({"per_client": 5}, "per_client belongs to split='fixed'"),
        ({"share": 0}, "share must lie in"),
        ({"clients": 91}, "91 clients of at least 1"),
        ({"split": "group"}, "FEMNISTDataModule"),
        ({"seed": -1}, "at least 0"),
    ],
)
def test_errors(arrays: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ready(arrays, **changes)


def test_what_is_no_data_module(arrays: str) -> None:
    with pytest.raises(TypeError, match="FederatedAveraging"):
        ClientsDataModule([torch.zeros(3)])  # type: ignore[arg-type]
    data = ClientsDataModule(ArrayDataModule(arrays))
    with pytest.raises(RuntimeError, match="not set up"):
        data.train_dataloader()
    with pytest.raises(RuntimeError, match="not set up"):
        _ = data.clients


def every_stream(image: Tensor) -> Tensor:
    """Draws from Python's, NumPy's and Torch's global stream."""
    shift = random.randrange(6), int(np.random.randint(6))
    return RandomHorizontalFlip()(RandomCrop(6, padding=2)(image.roll(shift, (1, 2))))


def read(
    seed: int = 0, round: int = 3, share: float = 1.0, workers: int = 0
) -> dict[int, Tensor]:
    """What each client that answers reads in a round."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (40, 1, 6, 6), dtype=torch.uint8, generator=generator)
    arrays = ImageArrays(images, torch.arange(40) % 4)
    source = ImageDataset(arrays, (0.0,), (1.0,), augment=every_stream)
    data = ClientDataset(source, iid_split(40, 5, seed=1), seed)
    sampler = RoundSampler(data.parts, share, seed=seed)
    sampler.set_epoch(round)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
    ((x, _, owners),) = list(loader)
    return {i: x[owners == i] for i in set(owners.tolist())}


def test_what_a_client_reads_depends_on_seed_round_and_client_only() -> None:
    torch.manual_seed(0)
    everyone = read()
    assert len(everyone) == 5
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    few = read(share=0.4)
    assert len(few) == 2
    for client, x in {**few, **read(workers=2)}.items():
        assert torch.equal(x, everyone[client])
    for other in (read(seed=1), read(round=4)):
        assert not any(torch.equal(other[i], everyone[i]) for i in everyone)
    first, second = (torch.unique(everyone[i], dim=0) for i in (0, 1))
    assert len(first) == len(second) == 8


def test_reading_a_round_leaves_the_global_streams_alone() -> None:
    def streams() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    def seeded() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    data = ClientDataset(
        ImageDataset(
            ImageArrays(torch.zeros(4, 1, 6, 6), torch.arange(4)),
            (0.0,),
            (1.0,),
            augment=every_stream,
        ),
        (torch.tensor([0, 1]), torch.tensor([2, 3])),
    )
    (batch,) = RoundSampler(data.parts)
    seeded()
    expected = streams()
    seeded()
    data.__getitems__(batch)
    assert streams() == expected
    seeded()
    data.__getitems__([0, 1])
    assert streams() != expected


def test_sampler_refuses_early() -> None:
    with pytest.raises(ValueError, match="clients must be at least 1"):
        RoundSampler([])
