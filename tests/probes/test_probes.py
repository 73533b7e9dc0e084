from __future__ import annotations

import dataclasses
import pickle
import random
from collections import Counter, namedtuple
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
)

from leakwatch.probes import ProbeSet
from leakwatch.probes.pipeline import find_normalization, walk
from leakwatch.probes.selection import find_labels


class Images(Dataset[Any]):
    """Images in [0, 1] with torchvision's attribute names; counts what is read."""

    def __init__(self, truth: list[int], **attributes: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self.data = torch.rand(len(truth), 3, 4, 4, generator=generator)
        self.truth = truth
        self.transform = self.target_transform = None
        # Not a list: what reading changes in Python's containers is put back.
        self._reads: SimpleQueue[int] = SimpleQueue()
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.truth)

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        self._reads.put(i)
        x: Any = self.data[i]
        y: Any = self.truth[i]
        if self.transform is not None:
            x = self.transform(x)
        return x, y if self.target_transform is None else self.target_transform(y)

    def reads(self) -> list[int]:
        return [self._reads.get() for _ in range(self._reads.qsize())]


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, x: Tensor) -> Tensor:
        for transform in self.transforms:
            x = transform(x)
        return x


class Normalize:
    def __init__(self, mean: Any, std: Any) -> None:
        self.mean, self.std = mean, std

    def __call__(self, x: Tensor) -> Tensor:
        shape = (-1, 1, 1)
        return (x - torch.tensor(self.mean).view(shape)) / torch.tensor(self.std).view(
            shape
        )


class Noise:
    """Draws from every global stream and from generators of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.old = np.random.RandomState(0)
        self.python = random.Random(0)
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, x: Tensor) -> Tensor:
        total = random.random() + np.random.rand() + self.rng.random()
        total += self.old.rand() + self.python.random()
        noise = torch.rand(x.shape) + torch.rand(x.shape, generator=self.generator)
        return (x + noise + total) / 10

    def states(self) -> str:
        return repr(
            (
                self.rng.bit_generator.state,
                self.old.get_state(),
                self.python.getstate(),
                self.generator.get_state().tolist(),
            )
        )


def streams() -> str:
    return repr(
        (random.getstate(), np.random.get_state(), torch.get_rng_state().tolist())
    )


def classes_of(probes: ProbeSet) -> Counter[int]:
    return Counter(probes.y.tolist())


X = torch.linspace(0, 1, 3 * 2 * 4).reshape(3, 2, 2, 2)
Y = torch.tensor([0, 2, 1])


# --- selection -------------------------------------------------------------------


def test_a_remainder_goes_to_different_classes() -> None:
    probes = ProbeSet.from_dataset(Images([i % 10 for i in range(200)]), n=32)
    assert sorted(classes_of(probes).values()) == [3] * 8 + [4] * 2
    assert len(set(probes.index)) == len(probes) == 32


def test_probes_are_the_items_that_their_indices_name() -> None:
    data = Images([i % 3 for i in range(30)], targets=[i % 3 for i in range(30)])
    probes = ProbeSet.from_dataset(data, n=7, seed=4)
    torch.testing.assert_close(probes.x, data.data[list(probes.index)], rtol=0, atol=0)
    assert probes.y.tolist() == [data.truth[i] for i in probes.index]


def test_small_classes_leave_their_share_to_others() -> None:
    probes = ProbeSet.from_dataset(Images([0] * 50 + [1] * 2 + [2] * 50), n=12)
    assert classes_of(probes) == {0: 5, 1: 2, 2: 5}


def test_per_class() -> None:
    probes = ProbeSet.from_dataset(Images([i % 4 for i in range(40)]), per_class=3)
    assert classes_of(probes) == {0: 3, 1: 3, 2: 3, 3: 3}


def test_a_class_that_is_too_small_is_taken_whole_with_one_warning() -> None:
    data = Images([0] * 9 + [1] * 2 + [2])
    with pytest.warns(
        UserWarning, match=r"2 of 3 classes hold fewer \(class 1 has 2, "
    ) as w:
        probes = ProbeSet.from_dataset(data, per_class=3)
    assert len(w) == 1
    assert classes_of(probes) == {0: 3, 1: 2, 2: 1}


def test_more_probes_than_items() -> None:
    with pytest.warns(UserWarning, match=r"n=32 probes; 5 items are available"):
        probes = ProbeSet.from_dataset(Images([0, 1, 0, 1, 0]))
    assert sorted(probes.index) == [0, 1, 2, 3, 4]


def test_more_classes_than_probes() -> None:
    labels = [i // 2 for i in range(2000)]
    drawn = [
        ProbeSet.from_dataset(Images(labels, targets=labels), n=32, seed=s).y
        for s in (0, 1)
    ]
    assert len(set(drawn[0].tolist())) == len(set(drawn[1].tolist())) == 32
    assert drawn[0].max() > 500 > drawn[0].min()
    assert not torch.equal(*drawn)


def test_selection_depends_on_the_seed_only() -> None:
    sets = []
    for outside, seed in [(0, 0), (1, 0), (1, 1)]:
        torch.manual_seed(outside), np.random.seed(outside), random.seed(outside)
        data = Images([i % 10 for i in range(200)], transform=Noise())
        data.transform.rng.random(outside)
        sets.append(ProbeSet.from_dataset(data, n=20, seed=seed, prior_samples=20))
    assert sets[0].index == sets[1].index != sets[2].index
    assert sets[0].fingerprint() == sets[1].fingerprint() != sets[2].fingerprint()
    assert sets[0].prior_std == sets[1].prior_std


def test_selection_is_the_same_on_every_machine() -> None:
    labels = [i % 7 for i in range(100)]
    probes = ProbeSet.from_dataset(Images(labels, targets=labels), n=9, seed=3)
    assert probes.index == (92, 89, 20, 3, 86, 25, 42, 22, 54)


def test_an_augmented_probe_depends_on_its_index_only() -> None:
    data = Images([i % 5 for i in range(50)], transform=Noise())
    probes = ProbeSet.from_dataset(data, n=6)
    alone = ProbeSet.from_dataset(data, indices=[probes.index[4]], data_range=1.0)
    assert torch.equal(alone.x[0], probes.x[4])


@pytest.mark.parametrize("scan", [False, True])
def test_no_random_stream_moves(scan: bool) -> None:
    labels = [i % 5 for i in range(60)]
    data = Images(
        labels, transform=Compose(Noise()), **({} if scan else {"targets": labels})
    )
    order = torch.Generator().manual_seed(3)
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=order)
    noise = data.transform.transforms[0]
    before = streams(), noise.states(), order.get_state().tolist()
    ProbeSet.from_loader(loader, n=10)
    assert (streams(), noise.states(), order.get_state().tolist()) == before


def test_streams_are_restored_when_an_item_fails() -> None:
    noise = Noise()
    data = Images([0] * 20, transform=Compose(noise, lambda x: x.byte()))
    before = streams(), noise.states()
    with pytest.raises(TypeError, match="uint8"):
        ProbeSet.from_dataset(data)
    assert (streams(), noise.states()) == before


def test_indices_are_taken_as_given() -> None:
    probes = ProbeSet.from_dataset(Images([0, 1, 2, 3]), indices=np.array([3, 1]))
    assert probes.index == (3, 1)
    assert probes.y.tolist() == [3, 1]


def test_labels_are_found_without_reading_items() -> None:
    data = Images([i % 10 for i in range(100)], targets=[i % 10 for i in range(100)])
    ProbeSet.from_dataset(data, n=10, prior_samples=0)
    assert len(data.reads()) == 10


def test_scanning_reads_no_more_than_max_scan() -> None:
    data = Images([i % 10 for i in range(1000)])
    probes = ProbeSet.from_dataset(data, n=10, max_scan=50, prior_samples=0)
    reads = data.reads()
    assert len(set(reads)) == 50
    assert len(classes_of(probes)) == 10
    assert max(reads) > 500


@pytest.mark.parametrize(
    "attributes",
    [
        {"targets": torch.tensor([2, 0, 1])},
        {"targets": None, "labels": np.array([2, 0, 1])},
        {"labels": np.array([[2], [0], [1]])},
        {"_labels": (2, 0, 1)},
        {"samples": [("a", 2), ("b", 0), ("c", 1)]},
        {"targets": [0.5, 1.5, 2.5], "imgs": [("a", 2), ("b", 0), ("c", 1)]},
    ],
)
def test_where_labels_are_found(attributes: dict[str, Any]) -> None:
    data = Images([9, 9, 9], **attributes)
    labels = find_labels(data)
    assert labels is not None
    assert labels.tolist() == [2, 0, 1]
    nested = ConcatDataset(
        [Subset(data, [2, 0]), TensorDataset(X, torch.tensor([5, 6, 7]))]
    )
    labels = find_labels(nested)
    assert labels is not None
    assert labels.tolist() == [1, 2, 5, 6, 7]


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"targets": [1, 2]},
        {"targets": ["cat", "dog", "cat"]},
        {"targets": [[1], [1, 2], []]},
        {"targets": torch.rand(3)},
        {"targets": torch.zeros(3, 2, dtype=torch.long)},
        {"labels": len},
    ],
)
def test_labels_that_are_not_class_indices_are_not_used(
    attributes: dict[str, Any],
) -> None:
    data = Images([0, 1, 2], **attributes)
    assert find_labels(data) is None
    assert find_labels(ConcatDataset([data, TensorDataset(X, Y)])) is None
    assert len(ProbeSet.from_dataset(data, n=3)) == 3


def test_target_transform_decides_the_label() -> None:
    labels = [i % 4 for i in range(20)]
    data = Images(labels, targets=labels, target_transform=lambda y: 3 - y)
    data.classes = ["a", "b", "c", "d"]
    probes = ProbeSet.from_dataset(data, per_class=1)
    assert probes.y.tolist() == [3 - labels[i] for i in probes.index]
    assert probes.class_names is None


@pytest.mark.parametrize(
    "item",
    [
        (X[0], 1),
        [X[0], 1],
        (X[0], torch.tensor(1), {"more": 0}),
        (X[0].numpy(), np.int64(1)),
        (X[0].tolist(), torch.tensor([1])),
        {"image": X[0], "label": 1, "path": "a"},
        {"x": X[0], "y": np.array([1])},
        namedtuple("Item", "index label image")(7, 1, X[0]),
        namedtuple("Item", "x index y more")(X[0], 7, 1, None),
        namedtuple("Item", "picture kind")(X[0], 1),
        namedtuple("Item", "image kind")(X[0], 1),
    ],
)
def test_forms_of_an_item(item: Any) -> None:
    probes = ProbeSet.from_dataset([item], n=1)
    torch.testing.assert_close(probes.x, X[:1], rtol=1e-6, atol=0)
    assert probes.y.tolist() == [1]


class PilLike:
    def getbands(self) -> tuple[str, ...]:
        return ("R", "G", "B")


@pytest.mark.parametrize(
    ("item", "error", "text"),
    [
        (
            (X[0],),
            TypeError,
            r"item 0 of list has 1 elements; expected \(input, label\)",
        ),
        ((X[0], 1, 2, 3), TypeError, "has 4 elements"),
        (X[0], TypeError, r"is a Tensor; expected \(input, label\) or a mapping"),
        ("ab", TypeError, "is a str"),
        (
            namedtuple("Item", "image index kind")(X[0], 7, 1),
            TypeError,
            r"a named tuple with the fields \('image', 'index', 'kind'\); expected one",
        ),
        ({"image": X[0], "z": 1}, TypeError, r"keys \['image', 'z'\]; expected one of"),
        ((X[0].byte(), 1), TypeError, r"torch\.uint8 .*expected floating point.*255"),
        ((torch.tensor([4, 5]), 1), TypeError, r"torch\.int64 .*embeddings"),
        ((PilLike(), 1), TypeError, r"PIL images .*ToTensor\(\)"),
        (({"a"}, 1), TypeError, "expected a tensor, an array or a sequence"),
        ((X[0], 1j), TypeError, "label is complex"),
        ((X[0], torch.zeros(0)), ValueError, "label is empty"),
        ((X[0], "cat"), TypeError, "got a str"),
        (
            (X[0], -1),
            ValueError,
            r"probe 0 has label -1; expected class indices from 0",
        ),
        (
            (torch.tensor(0.5), 1),
            ValueError,
            r"x has shape \(1,\); expected \(n, \.\.\.\)",
        ),
    ],
)
def test_unreadable_items(item: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ProbeSet.from_dataset([item], n=1)


def test_shapes_that_differ() -> None:
    data = [(torch.rand(3, 4, 4), 0), (torch.rand(3, 4, 5), 0)]
    with pytest.raises(ValueError, match=r"\(3, 4, 4\).*\(3, 4, 5\).*resize or crop"):
        ProbeSet.from_dataset(data, indices=[0, 1])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from [(X[0], 0)]


@pytest.mark.parametrize(
    ("dataset", "error", "text"),
    [
        (
            Stream(),
            TypeError,
            r"IterableDataset; .*ProbeSet\.from_tensors\(x, y, index=",
        ),
        (iter([]), TypeError, "no __getitem__ and __len__"),
        ([], ValueError, "is empty"),
    ],
)
def test_unusable_data_sets(dataset: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ProbeSet.from_dataset(dataset)


def test_unusable_loaders() -> None:
    with pytest.raises(TypeError, match=r"IterableDataset"):
        ProbeSet.from_loader(DataLoader(Stream()))
    with pytest.raises(
        TypeError, match=r"list; expected a DataLoader with a \.dataset"
    ):
        ProbeSet.from_loader([1, 2])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"n": 0}, ValueError, "n must be at least 1, got 0"),
        ({"n": 2.5}, TypeError, r"n must be an integer of at least 1, got 2\.5"),
        ({"per_class": 0}, ValueError, "per_class must be at least 1, got 0"),
        ({"max_scan": 0}, ValueError, "max_scan must be at least 1, got 0"),
        ({"prior_samples": -1}, ValueError, "prior_samples must be at least 0, got -1"),
        ({"seed": "a"}, TypeError, "seed must be an integer of at least 0, got 'a'"),
        ({"indices": []}, ValueError, "indices is empty"),
        ({"indices": [3]}, ValueError, "indices contains 3; expected 0 to 2"),
        ({"indices": [-1]}, ValueError, "indices contains -1"),
        (
            {"indices": [1, 2, 1]},
            ValueError,
            r"index 1 occurs twice \(probes 0 and 2\)",
        ),
    ],
)
def test_unusable_arguments(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        ProbeSet.from_dataset(TensorDataset(X, Y), **arguments)


# --- normalisation, range, prior ------------------------------------------------


def test_normalisation_is_found_in_nested_transforms() -> None:
    normalize = Normalize([0.5, 0.4, 0.3], [0.2, 0.1, 0.3])
    labels = [i % 2 for i in range(40)]
    data = Images(labels, transform=Compose(Compose(), nn.Sequential()))
    data.transform.transforms[0].transforms.append(normalize)
    raw = Images(labels)
    for wrapped in (data, Subset(data, range(40)), ConcatDataset([data, data])):
        probes = ProbeSet.from_dataset(wrapped, n=8)
        assert probes.mean == (0.5, 0.4, 0.3)
        assert probes.std == (0.2, 0.1, 0.3)
        assert (probes.units, probes.data_range) == ("pixel", 1.0)
        pixels = raw.data[[i % 40 for i in probes.index]]
        torch.testing.assert_close(probes.pixels(), pixels, rtol=0, atol=1e-6)


def test_normalisation_in_a_sequential_of_modules() -> None:
    module = nn.Identity()
    module.__class__ = type("Normalize", (nn.Identity,), {})
    module.mean, module.std = torch.tensor([0.1]), 0.2
    data = Images([0], transform=nn.Sequential(nn.Identity(), module))
    found = find_normalization(data, trust_attributes=False)
    assert found is not None
    assert found[0] == pytest.approx((0.1,))
    assert found[1] == (0.2,)


def test_mean_and_std_of_a_data_set_count_only_if_they_were_applied() -> None:
    data = Images([0, 1] * 8, mean=0.5, std=(0.25,))
    assert ProbeSet.from_dataset(data, n=4).mean is None
    data.data = (data.data - 0.5) / 0.25
    probes = ProbeSet.from_dataset(Subset(data, range(16)), n=4)
    assert (probes.mean, probes.std) == ((0.5,), (0.25,))
    assert 0 <= probes.pixels().min() <= probes.pixels().max() <= 1


def test_normalisations_that_disagree_are_not_guessed_at() -> None:
    twice = Compose(Normalize([0.5], [0.5]), Normalize([0.1], [0.2]))
    data = Images([0, 1] * 8, transform=twice)
    with pytest.warns(UserWarning, match="2 different normalisations"):
        assert ProbeSet.from_dataset(data, n=4).mean is None


def test_samples_in_a_plain_list_are_not_searched() -> None:
    data = [(X[0], 0), (X[1], 1)]
    assert list(walk(Subset(data, [0, 1])))[1:] == [data]


def test_given_values_go_before_found_ones() -> None:
    data = Images([0, 1] * 8, transform=Normalize([0.5], [0.5]))
    assert ProbeSet.from_dataset(data, n=2, mean=0.45, std=0.5).mean == (0.45,)


@pytest.mark.parametrize(
    ("x", "arguments", "data_range", "units"),
    [
        (X, {}, 1.0, "pixel"),
        (X * 255, {"data_range": 255}, 255.0, "pixel"),
        (X * 4 - 1, {}, 4.0, "input"),
        (X * 4 - 1, {"data_range": 6.0}, 6.0, "input"),
        (X * 4 - 1, {"mean": 0.25, "std": 0.25}, 1.0, "pixel"),
        (X * 4 - 1, {"mean": 0.25, "std": 0.25, "data_range": 2.0}, 2.0, "pixel"),
    ],
)
def test_data_range_and_units(
    x: Tensor, arguments: dict[str, Any], data_range: float, units: str
) -> None:
    probes = ProbeSet.from_tensors(x, Y, **arguments)
    assert probes.data_range == pytest.approx(data_range)
    assert probes.units == units


def test_pixels_outside_of_the_unit_interval_are_pointed_out() -> None:
    with pytest.warns(UserWarning, match=r"pixels lie in \[-0\.5, 2\].*check mean and"):
        probes = ProbeSet.from_tensors(X * 5 - 1, Y, mean=0.0, std=0.5)
    assert probes.data_range == pytest.approx(2.5)


def test_a_range_that_cannot_be_told() -> None:
    with pytest.raises(ValueError, match=r"all probe values equal 3.*data_range="):
        ProbeSet.from_tensors(torch.full((2, 2), 3.0), [0, 1])


def test_prior_of_the_data_set_in_pixel_units() -> None:
    raw = Images([i % 2 for i in range(300)])
    normalize = Normalize([0.5, 0.4, 0.3], [0.2, 0.1, 0.3])
    data = Images(raw.truth, transform=normalize)
    data.data = raw.data
    probes = ProbeSet.from_dataset(data, n=4, prior_samples=300)
    exact = raw.data.double()
    torch.testing.assert_close(
        probes.prior_mean.double(), exact.mean(0), rtol=0, atol=1e-6
    )
    assert probes.prior_std == pytest.approx(
        exact.var(0).mean().sqrt().item(), rel=1e-5
    )
    estimate = ProbeSet.from_dataset(data, n=4, prior_samples=100)
    assert estimate.prior_std == pytest.approx(probes.prior_std, rel=0.05)
    assert estimate.prior_std != probes.prior_std


def test_prior_keeps_its_digits_on_a_large_offset() -> None:
    x = torch.rand(64, 5, dtype=torch.float64)
    probes = ProbeSet.from_tensors(x + 1e7, [0] * 64)
    assert probes.prior_std == pytest.approx(
        (x + 1e7).var(0).mean().sqrt().item(), 1e-6
    )


def test_prior_without_enough_items() -> None:
    many = ProbeSet.from_tensors(torch.rand(16, 3), [0] * 16)
    assert many.prior_std == pytest.approx(many.x.var(0).mean().sqrt().item(), rel=1e-5)
    few = ProbeSet.from_tensors(X * 255, Y, data_range=255)
    assert few.prior_std == pytest.approx(255 / 12**0.5)
    torch.testing.assert_close(few.prior_mean, torch.full((2, 2, 2), 127.5))
    shifted = ProbeSet.from_tensors(X * 4 - 1, Y)
    torch.testing.assert_close(shifted.prior_mean, torch.full((2, 2, 2), 1.0))


def test_constant_data_has_a_usable_prior() -> None:
    probes = ProbeSet.from_tensors(torch.full((20, 3), 0.5), [0] * 20)
    assert probes.prior_std == pytest.approx(12**-0.5)


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 7), (2,), (2, 3, 2, 2)])
def test_scale_is_the_derivative_of_the_normalisation(shape: tuple[int, ...]) -> None:
    mean, std = (0.2, 0.7), (0.5, 0.25)
    pixels = torch.rand(4, *shape, dtype=torch.float64)
    column = (1, 2) + (1,) * (len(shape) - 1)
    x = (pixels - torch.tensor(mean).view(column)) / torch.tensor(std).view(column)
    probes = ProbeSet.from_tensors(x, [0] * 4, mean=mean, std=std)
    torch.testing.assert_close(probes.pixels(), pixels, rtol=0, atol=1e-7)
    step = torch.ones(shape, dtype=torch.float64)
    moved = (step / torch.tensor(std).view(column)).flatten()
    torch.testing.assert_close(probes.input_scale(), moved, rtol=1e-7, atol=0)


def test_scale_without_normalisation() -> None:
    probes = ProbeSet.from_tensors(X, Y)
    assert torch.equal(probes.input_scale(), torch.ones(8, dtype=torch.float64))
    assert torch.equal(probes.pixels(), probes.x)


# --- the set itself ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"x": X[:0], "y": Y[:0], "index": ()},
            ValueError,
            r"x has shape \(0, 2, 2, 2\)",
        ),
        ({"x": (X * 255).byte()}, TypeError, r"probe images are torch\.uint8"),
        (
            {"x": X.masked_fill(X > 0.9, torch.nan)},
            ValueError,
            r"probe 2 \(data-set index 9\) contains 3 NaN and 0 inf",
        ),
        ({"x": X.masked_fill(X > 0.9, torch.inf)}, ValueError, "0 NaN and 3 infinite"),
        ({"y": Y / 0}, ValueError, "the target of probe 0 holds NaN or infinity"),
        ({"y": torch.tensor([0, -2, 1])}, ValueError, "probe 1 has label -2"),
        ({"y": Y[:2]}, ValueError, r"y has shape \(2,\) for 3 probes; expected \(3,\)"),
        ({"index": (5, 7)}, ValueError, "got 2 indices for 3 probes"),
        ({"index": (5, 7, 5)}, ValueError, "index 5 occurs twice"),
        ({"mean": (0.5,)}, ValueError, "give both or neither"),
        (
            {"mean": (0.5,), "std": (0.5, 0.5, 0.5)},
            ValueError,
            "mean has 1 entries and std 3",
        ),
        (
            {"mean": (0.5,), "std": (0.0,)},
            ValueError,
            r"std must be positive, got \[0\.0\]",
        ),
        ({"mean": (torch.nan,), "std": (1.0,)}, ValueError, "mean must be finite"),
        (
            {"mean": "a", "std": (1.0,)},
            TypeError,
            "mean must be one finite number per channel, got 'a'",
        ),
        ({"data_range": 0.0}, ValueError, r"data_range=0\.0; expected a positive"),
        ({"prior_std": torch.nan}, ValueError, "prior_std=nan"),
        ({"prior_mean": X[0, 0]}, ValueError, r"prior_mean has shape \(2, 2\)"),
        ({"units": "mm"}, ValueError, "units='mm'; expected 'pixel' or 'input'"),
        ({"mean": (0.5,), "std": (0.5,), "units": "input"}, ValueError, "known mean"),
        (
            {"class_names": ("a", "b")},
            ValueError,
            r"probe 1 .* label 2; expected 0 to 1",
        ),
    ],
)
def test_invalid_sets(
    change: dict[str, Any], error: type[Exception], text: str
) -> None:
    valid = ProbeSet.from_tensors(X, Y, index=[4, 8, 9])
    with pytest.raises(error, match=text):
        dataclasses.replace(valid, **change)
    if change.keys() <= {"x", "y", "index", "mean", "std", "class_names", "data_range"}:
        arguments = {"x": X, "y": Y, "index": [4, 8, 9], **change}
        with pytest.raises(error, match=text):
            ProbeSet.from_tensors(**arguments)


def test_labels_are_checked_against_a_model() -> None:
    probes = ProbeSet.from_tensors(X, Y, index=[4, 8, 9])
    probes.check_labels(3)
    with pytest.raises(
        ValueError,
        match=r"probe 1 \(data-set index 8\) has label 2; expected 0 to 1 for 2",
    ):
        probes.check_labels(2)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_dtype(given: torch.dtype, stored: torch.dtype) -> None:
    probes = ProbeSet.from_tensors(X.to(given), Y.int())
    assert (probes.x.dtype, probes.pixels().dtype) == (stored, stored)
    assert probes.prior_mean.dtype == stored
    assert probes.y.dtype == torch.long
    drawn = ProbeSet.from_dataset([(X[0].to(given), 0)], n=1)
    assert drawn.x.dtype == stored


def test_a_set_is_frozen_and_holds_copies() -> None:
    x, y = X.clone().requires_grad_(), Y.clone()
    probes = ProbeSet.from_tensors(x, y)
    with torch.no_grad():
        x.zero_()
        y.zero_()
    assert torch.equal(probes.x, X)
    assert torch.equal(probes.y, Y)
    assert not probes.x.requires_grad
    with pytest.raises(dataclasses.FrozenInstanceError):
        probes.y = y  # type: ignore[misc]


def test_a_set_made_in_inference_mode_can_be_differentiated() -> None:
    with torch.inference_mode():
        probes = ProbeSet.from_tensors(X.clone(), Y.clone())
    assert not probes.x.is_inference()
    assert not probes.y.is_inference()
    assert not probes.prior_mean.is_inference()


def test_split_is_a_partition() -> None:
    x = torch.rand(7, 2)
    whole = ProbeSet.from_tensors(
        x, range(7), index=range(10, 17), class_names=list("abcdefg"), mean=0.0, std=1.0
    )
    parts = [whole.split(rank, 3) for rank in range(3)]
    assert [part.index for part in parts] == [(10, 13, 16), (11, 14), (12, 15)]
    assert sorted(i for part in parts for i in part.index) == list(whole.index)
    for rank, part in enumerate(parts):
        assert torch.equal(part.x, x[rank::3])
        assert part.class_of(1) == "abcdefg"[rank + 3]
        assert (part.prior_std, part.mean, part.data_range) == (
            whole.prior_std,
            whole.mean,
            whole.data_range,
        )
    assert whole.split(0, 1).fingerprint() == whole.fingerprint()


@pytest.mark.parametrize(
    ("rank", "size", "text"),
    [(3, 3, "rank=3; expected 0 to 2"), (-1, 3, "rank=-1"), (3, 8, "none of 3 probes")],
)
def test_shares_that_do_not_exist(rank: int, size: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ProbeSet.from_tensors(X, Y).split(rank, size)


def test_fingerprint_tells_probes_apart() -> None:
    probes = ProbeSet.from_tensors(X, Y)
    changed = X.clone()
    changed[1, 0, 0, 0] += 1e-6
    others = [
        ProbeSet.from_tensors(changed, Y),
        ProbeSet.from_tensors(X, [0, 2, 2]),
        ProbeSet.from_tensors(X, Y, index=[0, 1, 3]),
        ProbeSet.from_tensors(X.double(), Y),
        ProbeSet.from_tensors(X.flatten(1), Y),
    ]
    prints = {probes.fingerprint(), *(other.fingerprint() for other in others)}
    assert len(prints) == 6
    assert pickle.loads(pickle.dumps(probes)).fingerprint() == probes.fingerprint()


def test_repr_shows_no_pixels() -> None:
    assert (
        repr(ProbeSet.from_tensors(X, Y))
        == "ProbeSet(n=3, shape=(2, 2, 2), classes=3, units='pixel')"
    )


def test_class_names() -> None:
    labels = [0, 1] * 8
    data = Images(labels, targets=labels, classes=["cat", "dog"])
    probes = ProbeSet.from_dataset(Subset(data, range(16)), n=4)
    assert [probes.class_of(i) for i in range(4)] == [
        ["cat", "dog"][label] for label in probes.y
    ]
    assert ProbeSet.from_tensors(X, Y).class_of(1) == "2"
    data.classes = ["cat"]  # does not cover the labels: not the names of these classes
    assert ProbeSet.from_dataset(data, n=4).class_names is None


def test_read_only_arrays() -> None:
    image = np.full((1, 2, 2), 0.5, dtype=np.float32)
    image.flags.writeable = False
    assert ProbeSet.from_dataset([(image, 0)], n=1).x.sum() == 2


def test_another_default_device_does_not_matter() -> None:
    data = [(torch.full((1, 2, 2), i / 99), i % 2) for i in range(100)]
    expected = ProbeSet.from_dataset(data, n=4)
    with torch.device("meta"):
        probes = ProbeSet.from_dataset(data, n=4)
    assert probes.x.device.type == probes.prior_mean.device.type == "cpu"
    assert probes.fingerprint() == expected.fingerprint()
