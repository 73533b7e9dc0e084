from __future__ import annotations

import pytest
import torch

from leakwatch.datamodules.splits import stratified_first, stratified_split

LABELS = torch.tensor([2] * 30 + [0] * 10 + [1] * 20)


def test_split_is_stratified_and_complete() -> None:
    rest, part = stratified_split(LABELS, 0.1, seed=0)
    assert LABELS[part].bincount().tolist() == [1, 2, 3]
    assert torch.cat([rest, part]).sort().values.tolist() == list(range(60))
    assert rest.tolist() == sorted(rest.tolist())
    assert part.tolist() == sorted(part.tolist())


def test_split_follows_its_seed_only() -> None:
    state = torch.get_rng_state()
    first = stratified_split(LABELS, 0.5, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(2)
    assert torch.equal(first[1], stratified_split(LABELS, 0.5, seed=1)[1])
    assert not torch.equal(first[1], stratified_split(LABELS, 0.5, seed=2)[1])


@pytest.mark.parametrize("fraction", [0.01, 0.99])
def test_split_refuses_an_empty_side(fraction: float) -> None:
    with pytest.raises(ValueError, match="one side would be empty"):
        stratified_split(torch.arange(6) % 3, fraction, seed=0)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (3, [0, 30, 40]),
        (6, [0, 1, 30, 31, 40, 41]),
        (4, [0, 30, 31, 40]),
    ],
)
def test_first_takes_the_first_of_each_class(count: int, expected: list[int]) -> None:
    assert stratified_first(LABELS, count).tolist() == expected


def test_first_passes_over_exhausted_classes() -> None:
    chosen = stratified_first(LABELS, 45)
    assert LABELS[chosen].bincount().tolist() == [10, 18, 17]


def test_first_with_more_than_there_are() -> None:
    assert stratified_first(LABELS, 100).tolist() == list(range(60))


def test_first_with_classes_that_do_not_occur() -> None:
    assert stratified_first(torch.tensor([5, 5, 9]), 2).tolist() == [0, 2]
