from __future__ import annotations

import itertools

import pytest
import torch
from score_problems import Problem

from leakwatch.defenses import (
    Budget,
    EigenNoise,
    Proportional,
    RowNorms,
    Samples,
    Single,
    Smallest,
    Waterfill,
    row_norms,
)

LAMBDAS = torch.tensor([[9.0, 4.0, 1.0, 0.25, 0.0], [8.0, 6.0, 5.0, 2.0, 1.0]]).double()
RESOLVED = LAMBDAS > 0
TOTAL = torch.tensor([6.0, 12.0]).double()


def test_smallest_takes_resolved_directions_only() -> None:
    found = Smallest(2).spread(LAMBDAS, RESOLVED, TOTAL)
    assert found.tolist() == [[0, 0, 3, 3, 0], [0, 0, 0, 6, 6]]
    every = Smallest(10).spread(LAMBDAS, RESOLVED, TOTAL)
    assert every[0].tolist() == [1.5, 1.5, 1.5, 1.5, 0]
    nothing = Smallest(2).spread(LAMBDAS, torch.zeros_like(RESOLVED), TOTAL)
    assert float(nothing.sum()) == 0.0


@pytest.mark.parametrize(
    ("direction", "columns"), [(0, (0, 0)), (2, (2, 2)), (-1, (3, 4)), (-4, (0, 1))]
)
def test_single_counts_from_either_end(
    direction: int, columns: tuple[int, int]
) -> None:
    found = Single(direction).spread(LAMBDAS, RESOLVED, TOTAL)
    assert found.argmax(1).tolist() == list(columns)
    assert found.sum(1).tolist() == TOTAL.tolist()
    assert (found > 0).sum(1).tolist() == [1, 1]


@pytest.mark.parametrize("direction", [4, -5])
def test_single_refuses_a_direction_that_is_not_resolved(direction: int) -> None:
    with pytest.raises(ValueError, match=r"sample 0 is not resolved.* 4 of its 5"):
        Single(direction).spread(LAMBDAS, RESOLVED, TOTAL)


def test_proportional_makes_recovery_errors_equal() -> None:
    found = Proportional().spread(LAMBDAS, RESOLVED, TOTAL)
    torch.testing.assert_close(found.sum(1), TOTAL)
    errors = found[RESOLVED] / LAMBDAS[RESOLVED]
    expected = TOTAL / LAMBDAS.sum(1)
    torch.testing.assert_close(errors[:4], expected[:1].expand(4))
    torch.testing.assert_close(errors[4:], expected[1:].expand(5))
    even = Proportional(0.0).spread(LAMBDAS, RESOLVED, TOTAL)
    assert even[0].tolist() == [1.5, 1.5, 1.5, 1.5, 0]


def test_the_root_of_the_eigenvalue_leaves_least_information() -> None:
    lam, total = LAMBDAS[1:], TOTAL[1:]
    best = Proportional(0.5).spread(lam, lam > 0, total)
    least = (lam / best).sum()
    torch.testing.assert_close(least, lam.sqrt().sum() ** 2 / total[0])
    stream = torch.Generator().manual_seed(0)
    for _ in range(200):
        other = torch.rand(lam.shape, generator=stream).double()
        other = total * other / other.sum()
        assert float((lam / other).sum()) >= float(least)


def test_waterfill_by_hand() -> None:
    # Costs at R = 2: 36, 16, 4, 1, none; then 32, 24, 20, 8, 4.
    found = Waterfill(2.0).spread(LAMBDAS, RESOLVED, TOTAL)
    assert found.tolist() == [[0, 1, 4, 1, 0], [0, 0, 0, 8, 4]]


def test_waterfill_does_not_spend_what_hides_nothing_more() -> None:
    found = Waterfill(1.0).spread(
        LAMBDAS, RESOLVED, torch.tensor([100.0, 22.0]).double()
    )
    assert found[0].tolist() == LAMBDAS[0].tolist()
    assert found[1].tolist() == LAMBDAS[1].tolist()
    assert float(found[1].sum()) == 22.0


@pytest.mark.parametrize("budget", [0.2, 1.3, 5.3, 9.0, 14.9, 21.0])
def test_waterfill_hides_as_many_directions_as_can_be_hidden(budget: float) -> None:
    lam = LAMBDAS[1]
    found = Waterfill(1.0).spread(
        lam[None], lam[None] > 0, torch.tensor([budget]).double()
    )[0]
    hidden = int((found >= lam * (1 - 1e-12)).sum())
    affordable = [
        len(chosen)
        for k in range(6)
        for chosen in itertools.combinations(lam.tolist(), k)
        if sum(chosen) <= budget
    ]
    assert hidden == max(affordable)
    assert float(found.sum()) == pytest.approx(budget)


def test_row_norms_are_exact_by_products(problem: Problem, samples: Samples) -> None:
    found = row_norms(samples.jacobian)
    for i, oracle in enumerate(problem.oracles):
        expected = oracle.j.norm(dim=1)
        torch.testing.assert_close(found[i], expected, rtol=1e-10, atol=1e-15)


def test_estimated_row_norms_converge(samples: Samples) -> None:
    exact = row_norms(samples.jacobian).square()
    for probes in (50, 800):
        found = row_norms(samples.jacobian, probes).square()
        error = (found - exact).norm() / exact.norm()
        # √(2/probes) for each row at most; rows of one layer are nearly one vector.
        assert float(error) < 3 * (2 / probes) ** 0.5
    again = row_norms(samples.jacobian, 50)
    assert torch.equal(again, row_norms(samples.jacobian, 50))


def test_noise_by_row_norms_leaves_least_information(
    problem: Problem, samples: Samples, generator: torch.Generator
) -> None:
    total = torch.tensor([3.0, 3.0]).double()
    best = RowNorms(probes=None, floor=0.0).covariance(samples, total).variance
    torch.testing.assert_close(best.sum(1), total)
    for i, oracle in enumerate(problem.oracles):
        squares = oracle.j.square().sum(1)
        used = squares > 0

        def information(
            variance: torch.Tensor, s: torch.Tensor = squares, m: torch.Tensor = used
        ) -> float:
            return float((s[m] / variance[m]).sum())

        least = information(best[i])
        assert least == pytest.approx(float(squares.sqrt().sum()) ** 2 / 3, rel=1e-9)
        others = [squares, torch.ones_like(squares), squares**0.25]
        for _ in range(100):
            # Near the optimum as well as far from it.
            noise = torch.randn(len(squares), generator=generator).double()
            others.append(best[i] * (0.1 * noise).exp())
            others.append(torch.rand(len(squares), generator=generator).double())
        for other in others:
            assert information(3 * other / other.sum()) >= least * (1 - 1e-12)


def test_no_row_is_left_bare_by_an_estimate(samples: Samples) -> None:
    total = torch.ones(2).double()
    variance = RowNorms(probes=2, floor=0.1).covariance(samples, total).variance
    torch.testing.assert_close(variance.sum(1), total)
    # The floor is relative to the mean before it was applied, which it raises.
    assert bool((variance.amin(1) >= 0.09 * variance.mean(1)).all())


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        Smallest(0)
    with pytest.raises(ValueError, match="box must be positive and finite, got 0"):
        Waterfill(0.0)
    with pytest.raises(TypeError, match=r"probes must be an integer.*got 2\.5"):
        RowNorms(probes=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"smallest, single, .* input_space"):
        EigenNoise(Budget(1.0), "largest")
    with pytest.raises(ValueError, match="got 'uniform'"):
        EigenNoise(Budget(1.0), coefficients="uniform")  # type: ignore[arg-type]
