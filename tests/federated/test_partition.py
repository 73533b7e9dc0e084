"""Every sample once, in the proportions that were asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from leakwatch.federated import dirichlet_split, fixed_split, group_split, iid_split
from leakwatch.federated.partition import _rounded

LABELS = torch.randint(10, (997,), generator=torch.Generator().manual_seed(0))
SPLITS: dict[str, Callable[[int], tuple[Tensor, ...]]] = {
    "iid": lambda seed: iid_split(997, 7, seed=seed),
    "dirichlet": lambda seed: dirichlet_split(LABELS, 7, alpha=0.3, seed=seed),
    "dirichlet-sharp": lambda seed: dirichlet_split(
        LABELS, 60, alpha=0.01, least=9, seed=seed
    ),
    "groups": lambda seed: group_split(LABELS + 5 * seed),
}


@pytest.mark.parametrize("name", SPLITS)
def test_every_index_is_in_one_client(name: str) -> None:
    for seed in range(3):
        parts = SPLITS[name](seed)
        assert torch.cat(parts).sort().values.tolist() == list(range(997))
        assert all(torch.equal(part, part.sort().values) for part in parts)
        assert all(part.dtype == torch.int64 for part in parts)


@pytest.mark.parametrize("name", [name for name in SPLITS if name != "groups"])
def test_the_seed_decides_and_the_global_stream_does_not(name: str) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = SPLITS[name](1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    for a, b in zip(first, SPLITS[name](1), strict=True):
        assert torch.equal(a, b)
    other = SPLITS[name](2)
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_iid_sizes() -> None:
    assert sorted(map(len, iid_split(997, 7))) == [142, 142, 142, 142, 143, 143, 143]


def test_fixed_sizes_without_overlap() -> None:
    parts = fixed_split(997, 19, 50, seed=3)
    assert [len(part) for part in parts] == [50] * 19
    assert torch.cat(parts).unique().numel() == 950


def shares(alpha: float, clients: int = 5) -> Tensor:
    """Share of each client in each of 400 classes of 200 samples."""
    labels = torch.arange(80_000) % 400
    parts = dirichlet_split(labels, clients, alpha=alpha)
    return torch.stack([labels[p].bincount(minlength=400) / 200 for p in parts], 1)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_shares_have_the_moments_of_the_dirichlet_distribution(alpha: float) -> None:
    found = shares(alpha)
    torch.testing.assert_close(found.sum(1), torch.ones(400), rtol=1e-6, atol=0.0)
    variance = 0.2 * 0.8 / (5 * alpha + 1)
    # 2,000 draws: five standard errors of the mean, and 15 % of the variance.
    error = 5 * (variance / 400) ** 0.5
    torch.testing.assert_close(
        found.mean(0), torch.full((5,), 0.2), rtol=0.0, atol=error
    )
    assert float(found.var()) == pytest.approx(variance, rel=0.15)


def test_the_least_is_kept_and_only_taken_from_those_who_have_most() -> None:
    parts = dirichlet_split(LABELS, 60, alpha=0.01, least=9)
    assert min(map(len, parts)) == 9
    free = dirichlet_split(LABELS, 60, alpha=0.01, least=1)
    before, after = (torch.tensor([len(p) for p in found]) for found in (free, parts))
    poor = before < 9
    assert int(poor.sum()) > 20
    assert bool((after[poor] == 9).all())
    assert int(before.max()) > int(after.max())


def test_a_large_alpha_is_an_even_split() -> None:
    found = shares(1e6)
    torch.testing.assert_close(found, torch.full_like(found, 0.2), rtol=0, atol=0.006)


@pytest.mark.parametrize("alpha", [1e6, 1e300, 1.7e308])
@pytest.mark.parametrize("clients", [4, 7, 50, 60])
def test_sizes_become_even_also_with_fewer_samples_of_a_class_than_clients(
    clients: int, alpha: float
) -> None:
    labels = torch.arange(130) % 13
    sizes = [len(p) for p in dirichlet_split(labels, clients, alpha=alpha)]
    assert sum(sizes) == 130
    assert max(sizes) - min(sizes) <= 1


def test_rounding_moves_nobody_by_more_than_a_sample() -> None:
    rng = np.random.default_rng(0)
    owed = np.zeros(6)
    wanted = 17 * rng.dirichlet([0.2] * 6, size=200)
    counts = np.stack([_rounded(w, 17, owed, rng) for w in wanted])
    assert counts.sum(1).tolist() == [17] * 200
    assert float(np.abs(counts - wanted).max()) <= 1
    np.testing.assert_allclose(owed, (wanted - counts).sum(0), rtol=0, atol=1e-10)
    assert float(np.abs(owed).max()) < 2


def test_numbers_may_be_those_of_numpy() -> None:
    i = np.int64
    pairs = (
        (iid_split(i(10), i(3), seed=i(1)), iid_split(10, 3, seed=1)),
        (fixed_split(i(10), i(3), i(2)), fixed_split(10, 3, 2)),
        (
            dirichlet_split(LABELS, i(4), alpha=np.float32(0.5), least=i(9)),
            dirichlet_split(LABELS, 4, alpha=0.5, least=9),
        ),
        (group_split(LABELS, clients=i(3)), group_split(LABELS, clients=3)),
    )
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_groups_in_order_and_with_enough_samples() -> None:
    groups = torch.tensor([4, 1, 4, -1, 1, 4, 9])
    assert [p.tolist() for p in group_split(groups)] == [[1, 4], [0, 2, 5], [6]]
    assert [p.tolist() for p in group_split(groups, least=2)] == [[1, 4], [0, 2, 5]]
    assert [p.tolist() for p in group_split(groups, clients=1, least=2)] == [[1, 4]]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: iid_split(3, 4), ValueError, "4 clients of at least 1"),
        (lambda: iid_split(3, 0), ValueError, "clients must be at least 1"),
        (lambda: iid_split(3, 1.0), TypeError, "clients must be an integer"),
        (lambda: iid_split(3, 1, seed=-1), ValueError, "seed"),
        (lambda: fixed_split(99, 10, 10), ValueError, "need 100 samples, got 99"),
        (lambda: fixed_split(99, 10, 0), ValueError, "per_client"),
        (lambda: dirichlet_split(LABELS, 5, alpha=0.0), ValueError, "alpha"),
        (lambda: dirichlet_split(LABELS, 5, alpha=torch.nan), ValueError, "alpha"),
        (
            lambda: dirichlet_split(LABELS, 5, alpha="x"),
            TypeError,
            "alpha must be a nu",
        ),
        (
            lambda: dirichlet_split(LABELS, 5, alpha=None),
            TypeError,
            "alpha must be a n",
        ),
        (lambda: iid_split(3, 1, seed=2**64), ValueError, "below 2"),
        (lambda: dirichlet_split(LABELS, 100, least=10), ValueError, "need 1000"),
        (lambda: dirichlet_split(LABELS.float(), 5), TypeError, "torch.float32"),
        (lambda: dirichlet_split(LABELS[None], 5), ValueError, r"\(1, 997\)"),
        (lambda: group_split([1, 2]), TypeError, "got list"),
        (lambda: group_split(LABELS, clients=11), ValueError, "10 of 10 groups"),
        (lambda: group_split(LABELS, least=500), ValueError, "0 of 10 groups"),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
