"""Reading probes leaves no trace in what was read."""

from __future__ import annotations

import functools
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, Subset

from leakwatch.probes import ProbeSet
from leakwatch.probes.dataset_state import DatasetState

N = 40
HANDLE: Any = None
CACHE: dict[int, Any] = {}


@functools.lru_cache
def opened(path: Path) -> Any:
    return path.open("rb")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with an image of 2×2 pixels for each item."""
    file = tmp_path_factory.mktemp("data") / "images.bin"
    file.write_bytes(np.linspace(0, 1, N * 4, dtype=np.float32).tobytes())
    return file


class Base(Dataset[Any]):
    """Reads item i at its place in a file, from a handle that `handle` gives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.targets = [i % 2 for i in range(N)]

    def __len__(self) -> int:
        return N

    def handle(self) -> Any:
        raise NotImplementedError

    def __getitem__(self, i: int) -> tuple[Any, int]:
        file = self.handle()
        file.seek(16 * i)
        x = np.frombuffer(file.read(16), dtype=np.float32).reshape(1, 2, 2)
        return torch.tensor(x), self.targets[i]


class OnInstance(Base):
    file: Any = None

    def handle(self) -> Any:
        if self.file is None:
            self.file = self.path.open("rb")
        return self.file


class OnClass(Base):
    file: Any = None

    def handle(self) -> Any:
        if OnClass.file is None:
            OnClass.file = self.path.open("rb")
        return OnClass.file


class InModule(Base):
    def handle(self) -> Any:
        global HANDLE
        if HANDLE is None:
            HANDLE = self.path.open("rb")
        return HANDLE


class InHelper(Base):
    class Reader:
        __slots__ = ("file",)

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.readers = [self.Reader()]

    def handle(self) -> Any:
        if not hasattr(self.readers[0], "file"):
            self.readers[0].file = self.path.open("rb")
        return self.readers[0].file


class InCache(Base):
    def handle(self) -> Any:
        return opened(self.path)


class BeforeIt(Base):
    """A handle that was open before keeps its position."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.file = path.open("rb")
        self.file.seek(7)

    def handle(self) -> Any:
        return self.file

    def __del__(self) -> None:
        self.file.close()


class Caching(Base):
    """Keeps what it read, in every way that people do."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.listed: list[Any] = [None] * N
        self.array = np.zeros((N, 4), np.float32)
        self.filled = torch.zeros(N, dtype=torch.bool)
        self.objects = np.full(N, None)
        self.count = 0
        self.lazily: set[int]
        self.kept = functools.partial(self.keep, {})
        closed: list[int] = []
        self.note: Callable[[int], None] = lambda i: closed.append(i)
        self.closed = lambda: len(closed)

    def keep(self, store: dict[int, Any], i: int, x: Any) -> None:
        store[i] = x

    def __getitem__(self, i: int) -> tuple[Any, int]:
        x = torch.full((1, 2, 2), i / N)
        self.listed[i] = self.objects[i] = CACHE[i] = x
        self.array[i] = x.flatten()
        self.filled[i] = True
        self.count += 1
        if not hasattr(self, "lazily"):
            self.lazily = set()
        self.lazily.add(i)
        self.kept(i, x)
        self.note(i)
        return x, self.targets[i]

    def state(self) -> Any:
        return (
            self.listed, self.array.sum(), int(self.filled.sum()), self.count,
            hasattr(self, "lazily"), list(self.objects), self.kept.args[0],
            self.closed(), dict(CACHE), list(vars(self)),
        )  # fmt: skip


def no_trace(data: Base) -> bool:
    """Nothing open is left, and what was open is where it was."""
    if isinstance(data, BeforeIt):
        return data.file.tell() == 7
    if isinstance(data, InHelper) and hasattr(data.readers[0], "file"):
        return False
    left = (HANDLE, OnClass.file, vars(data).get("file"))
    return left == (None, None, None) and opened.cache_info().currsize == 0


@pytest.mark.parametrize(
    "kind", [OnInstance, OnClass, InModule, InHelper, InCache, BeforeIt]
)
@pytest.mark.parametrize(
    "wrap", [lambda d: d, lambda d: ConcatDataset([Subset(d, [*range(N)])])]
)
def test_handles_are_closed_or_where_they_were(
    path: Path, kind: type[Base], wrap: Callable[[Base], Any]
) -> None:
    data = kind(path)
    probes = ProbeSet.from_dataset(wrap(data), n=4)
    expected = [[i * 4 / (4 * N - 1)] for i in probes.index]
    torch.testing.assert_close(probes.x[:, 0, 0, :1], torch.tensor(expected))
    assert no_trace(data)
    if kind not in (BeforeIt, InHelper):
        pickle.dumps(data)  # as for workers that are spawned


def test_caches_are_as_they_were(path: Path) -> None:
    data = Caching(path)
    before = repr(data.state())
    ProbeSet.from_dataset(data, n=4)
    assert repr(data.state()) == before


def test_a_cache_that_was_filled_stays(path: Path) -> None:
    data = Caching(path)
    _ = data[3]
    before = repr(data.state())
    ProbeSet.from_dataset(data, n=4)
    assert repr(data.state()) == before
    CACHE.clear()


def test_a_trace_is_undone_after_an_error(path: Path) -> None:
    data = OnInstance(path)
    with pytest.raises(ValueError, match="occurs twice"):
        ProbeSet.from_dataset(data, indices=[1, 1])
    assert no_trace(data)


def test_transforms_are_as_they_were(path: Path) -> None:
    norm = nn.BatchNorm2d(1, affine=False)

    class Transformed(OnInstance):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.transform = norm

        def __getitem__(self, i: int) -> tuple[Any, int]:
            x, y = super().__getitem__(i)
            return self.transform(x[None])[0], y

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # normalised items leave [0, 1]
        ProbeSet.from_dataset(Transformed(path), n=4, mean=0.0, std=1.0)
    assert norm.running_mean is not None
    assert float(norm.running_mean) == float(norm.num_batches_tracked) == 0


def test_a_large_array_is_not_copied(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leakwatch.probes.dataset_state.LARGEST_COPY", 100)
    data = Caching(path)
    state = DatasetState(data)
    assert [a.nbytes for a, _ in state._arrays] == []
    assert [t.nbytes for t, _ in state._tensors] == [N]


def test_a_sampler_is_as_it_was(path: Path) -> None:
    class Odd(Sampler[int]):
        def __init__(self) -> None:
            self.passes = 0
            self.generator = torch.Generator().manual_seed(0)

        def __iter__(self) -> Iterator[int]:
            self.passes += 1
            order = torch.randperm(N // 2, generator=self.generator)
            return iter((2 * order + 1).tolist())

    sampler = Odd()
    before = sampler.generator.get_state().tolist(), torch.get_rng_state().tolist()
    probes = ProbeSet.from_loader(DataLoader(OnInstance(path), sampler=sampler), n=6)
    assert all(i % 2 for i in probes.index)
    assert sampler.passes == 0
    after = sampler.generator.get_state().tolist(), torch.get_rng_state().tolist()
    assert after == before


class Lazily(Base):
    """A property that opens something is not asked before the state is known."""

    _store: Any = None

    @property
    def dataset(self) -> Any:
        if self._store is None:
            self._store = self.path.open("rb")
        return self._store

    def handle(self) -> Any:
        return self.dataset


def test_properties_that_open_leave_nothing(path: Path) -> None:
    data = Lazily(path)
    ProbeSet.from_dataset(data, n=4)
    assert data._store is None
