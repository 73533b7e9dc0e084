"""Drawing probes from the training data changes neither the data nor the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monitor_cases import CLASSES, Tiny, dataset, fit, monitor
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    Sampler,
    WeightedRandomSampler,
    default_collate,
)

from leakwatch.callbacks._probing.training_probes import SampleSource, training_probes
from leakwatch.probes import ProbeSet

N = 48


class Lazy(Dataset[Any]):
    """Opens its file when it is first read, as is usual for workers."""

    file: Any = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.images = np.random.default_rng(0).random((N, 1, 4, 4), dtype=np.float32)
        self.images.tofile(path)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, int, int]:
        if self.file is None:
            self.file = self.path.open("rb")
        self.file.seek(64 * i)
        # Slow enough for two workers with one offset to get into each other's way.
        x = b"".join(self.file.read1(8) for _ in range(8))
        image = torch.frombuffer(bytearray(x), dtype=torch.float32).view(1, 4, 4)
        return image, i % CLASSES, i


class Comparing(Tiny):
    wrong = 0
    truth: Tensor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, i = batch
        self.wrong += int((x != self.truth[i]).any())
        return super().training_step((x, y), batch_idx)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_open_their_own_files(tmp_path: Path) -> None:
    weights = []
    for callbacks in ([], [monitor()]):
        data = Lazy(tmp_path / "images.bin")
        torch.manual_seed(0)
        module = Comparing()
        module.truth = torch.from_numpy(data.images)
        loader = DataLoader(data, 2, shuffle=True, num_workers=2)
        fit(tmp_path, *callbacks, module=module, data=loader, max_epochs=2)
        assert module.wrong == 0
        assert data.file is None
        weights.append([p.detach().clone() for p in module.parameters()])
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)


class Holes(Dataset[Any]):
    """Some items are None, and some raise an error."""

    def __init__(self, bad: Callable[[int], bool], error: bool = False) -> None:
        self.targets = [i % CLASSES for i in range(N)]
        self.bad, self.error = bad, error

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        if self.bad(i):
            if self.error:
                raise OSError(f"no image {i}")
            return None
        return torch.full((1, 4, 4), i / N), self.targets[i]


def dropping(items: list[Any]) -> Any:
    return default_collate([item for item in items if item is not None])


def test_items_that_training_drops_stop_nothing(tmp_path: Path) -> None:
    data = Holes(lambda i: i % 4 == 1)
    loader = DataLoader(data, 8, collate_fn=dropping)
    watched = monitor(probes=6)
    with pytest.warns(UserWarning, match=r"can't be read, and others took their place"):
        fit(tmp_path, watched, data=loader)
    assert watched.probes is not None
    assert all(i % 4 != 1 for i in watched.probes.index)
    assert watched.probes.y.bincount().tolist() == [2, 2, 2]


@pytest.mark.parametrize("error", [False, True])
def test_the_prior_passes_over_what_can_t_be_read(error: bool) -> None:
    data = Holes(lambda i: i == 7, error)
    probes = ProbeSet.from_dataset(data, indices=[1, 2, 3])
    values = torch.tensor([i / N for i in range(N) if i != 7], dtype=torch.float64)
    assert probes.prior_std == pytest.approx(float(values.std()), rel=1e-6)
    with pytest.raises((TypeError, ValueError), match="item 7 of Holes"):
        ProbeSet.from_dataset(data, indices=[1, 7])


def test_nothing_but_unreadable_items_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"item \d+ of Holes can't be read .*no image"):
        ProbeSet.from_dataset(Holes(lambda i: True, error=True))
    unlabelled = Holes(lambda i: True)
    del unlabelled.targets
    with pytest.raises(TypeError, match="is a NoneType; expected"):
        ProbeSet.from_dataset(unlabelled)


class Evens(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(0, N, 2)

    def __len__(self) -> int:
        return N // 2


class PairsOfEvens(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        yield from ([i, i + 2] for i in range(0, N, 4))

    def __len__(self) -> int:
        return N // 4


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 2 * int(torch.randint(N // 2, ()))


EVEN_WEIGHTS = [1.0, 0.0] * (N // 2)


@pytest.mark.parametrize(
    "how",
    [
        {"sampler": Evens()},
        {"sampler": [*range(0, N, 2)]},
        {"sampler": WeightedRandomSampler(EVEN_WEIGHTS, N)},
        {"batch_sampler": PairsOfEvens()},
        {"sampler": Endless()},
    ],
)
def test_only_what_the_sampler_yields_is_read(how: dict[str, Any]) -> None:
    data = Holes(lambda i: bool(i % 2), error=True)
    loader = DataLoader(data, **how)
    source = SampleSource(loader, None)
    arguments: dict[str, Any] = {"caller": "x", "n": 6, "mean": None, "std": None}
    drawn = training_probes(source, seed=0, **arguments)
    again = training_probes(source, seed=0, indices=drawn.index, **arguments)
    for probes in (drawn, again, ProbeSet.from_loader(loader, 6)):
        assert all(i % 2 == 0 for i in probes.index)
        assert probes.prior_std == drawn.prior_std
    assert drawn.prior_std == pytest.approx(
        float(torch.arange(0, N, 2).double().std() / N), rel=0.2
    )


def test_processes_read_what_any_of_them_trains_on() -> None:
    loader = DataLoader(dataset(N), sampler=[*range(0, N, 4)])
    others = [*range(2, N, 4)]
    source = SampleSource(loader, None, gathered=lambda mine: [mine, others])
    probes = training_probes(source, caller="x", n=N // 2, seed=0, mean=None, std=None)
    assert sorted(probes.index) == [*range(0, N, 2)]


def test_a_resumed_run_measures_the_same_prior() -> None:
    data = dataset(600)
    drawn = ProbeSet.from_dataset(data, n=4)
    again = ProbeSet.from_dataset(data, indices=drawn.index)
    assert again.prior_std == drawn.prior_std
    torch.testing.assert_close(again.prior_mean, drawn.prior_mean, rtol=0, atol=0)
