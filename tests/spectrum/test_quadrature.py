"""Sums over the spectrum: within their stated errors, and bracketed per start."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from leakwatch.spectrum import as_factor, ends, quadrature, trace
from leakwatch.spectrum.golub_kahan import Bidiagonalisation
from leakwatch.spectrum.spectral_measure import Function, Probe

from .cases import Case, geometric, mixed_batch, network_like, rotated
from .factors import FACTORS, RecordingFactor, factor

by_name = pytest.mark.parametrize("case", FACTORS, ids=lambda case: case.name)


def functions(scale: float) -> dict[str, tuple[int, Function]]:
    """Those of the scores, with a damping of 1 % of λ_1."""
    eps = 1e-2 * scale if scale > 0 else 1.0
    return {
        "bayes": (0, lambda lam: eps / (lam + eps)),
        "bits": (0, lambda lam: torch.log1p(lam / eps)),
        "i2f": (1, lambda lam: (lam + eps).reciprocal().square()),
        "trace": (1, torch.ones_like),
    }


def true_sum(lam: Tensor, moment: int, function: Function) -> float:
    return float((function(lam) * (lam if moment else 1.0)).sum())


@by_name
@pytest.mark.parametrize("depth", [5])
def test_sums_are_within_their_errors(case: Case, depth: int) -> None:
    """Four standard errors and the bracket, for every kind of spectrum."""
    j = factor(case.matrix())
    lam = torch.linalg.svdvals(j).square()
    found = ends(j, max_matvecs=12)
    measure = quadrature(j, depth=depth, known=found.leading, lower=found.lower)[0]
    assert measure is not None
    for name, (moment, function) in functions(float(lam[0])).items():
        got = measure.estimate(function, moment=moment)  # type: ignore[arg-type]
        want = true_sum(lam, moment, function)
        slack = 4 * got.error + 1e-9 * abs(want)
        assert got.low - slack <= want <= got.high + slack, name
        assert got.low <= got.value <= got.high, name


@pytest.mark.parametrize("depth", [1, 2, 6])
@pytest.mark.parametrize("lower", [0.0, 0.5])
def test_gauss_and_radau_bracket_each_start(depth: int, lower: float) -> None:
    """Not only on average: zᵀf(H)z of every single start, down to 1e-12."""
    lam = network_like(40, 1e3)
    j = factor(rotated(lam))
    values, vectors = torch.linalg.eigh(j.mT @ j)
    for seed in range(2):
        z = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed)).double()
        z = z / z.norm()
        chain = Bidiagonalisation(as_factor(j), z, depth)
        for _ in range(depth):
            chain.step(torch.ones(1, dtype=torch.bool))
        probe = Probe.of(chain.upper(0), closed=False, lower=lower * float(values[0]))
        weights = (vectors.mT @ z[0]).square()
        inverse = (0, torch.reciprocal)
        wanted = {**functions(float(lam[0])), **({"inverse": inverse} if lower else {})}
        for name, (moment, function) in wanted.items():
            power = values if moment else 1.0
            truth = float((weights * power * function(values)).sum())
            ends_of = [
                float((rule.weights * function(rule.nodes)).sum())
                * (probe.mean if moment else 1.0)
                for rule in (probe.gauss[moment], probe.radau[moment])
            ]
            assert min(ends_of) <= truth * (1 + 1e-10), name
            assert max(ends_of) >= truth * (1 - 1e-10), name


def test_deep_quadrature_leaves_chance_alone() -> None:
    """With all n steps the rules are exact, so the bracket closes."""
    j = factor(rotated(network_like(40, 1e3)))
    measure = quadrature(j, depth=40)[0]
    assert measure is not None
    for moment, function in functions(1.0).values():
        got = measure.estimate(function, moment=moment)  # type: ignore[arg-type]
        assert got.high - got.low <= 1e-9 * got.value


def test_standard_errors_are_those_of_repetition() -> None:
    """The spread of 30 estimates against the mean of what they state."""
    j = factor(rotated(geometric(60, 1e2)))
    lam = torch.linalg.svdvals(j).square()
    moment, function = functions(1.0)["i2f"]
    want = true_sum(lam, moment, function)
    off, stated = [], []
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        measure = quadrature(j, depth=30, generator=generator)[0]
        assert measure is not None
        got = measure.estimate(function, moment=1)
        off.append(got.value - want)
        stated.append(got.error)
    spread = math.sqrt(sum(o * o for o in off) / len(off))
    assert 0.6 < spread / (sum(stated) / len(stated)) < 1.5


def test_known_vectors_take_the_variance_out_of_the_trace() -> None:
    lam = geometric(100, 1e3) * 0.01
    lam[:2] = torch.tensor([1.0, 0.7])
    j = factor(rotated(lam))
    found = ends(j, smallest=False)
    for probe in (
        lambda known: trace(j, known=known),
        lambda known: _trace(quadrature(j, depth=2, known=known)),
    ):
        (plain, error), (better, less) = probe(None), probe(found.leading)
        assert float(less) < 0.1 * float(error)
        assert abs(float(better - lam.sum())) < 4 * float(less)
        assert abs(float(plain - lam.sum())) < 4 * float(error)


def _trace(measures) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    got = measures[0].trace()
    return torch.tensor(got.value), torch.tensor(got.error)


def test_a_start_stops_when_the_functions_are_settled() -> None:
    j = torch.stack([factor(rotated(network_like(60, 1e4)))] * 2)
    easy, hard = ([(0, lambda lam, e=e: e / (lam + e))] for e in (1.0, 1e-3))
    operator = RecordingFactor(j)
    measures = quadrature(operator, depth=30, functions=[easy, hard], probes=2)
    assert int(operator.forwards[0]) < 12 < int(operator.forwards[1])
    for i, measure in enumerate(measures):
        assert measure is not None
        assert measure.products == int(operator.forwards[i])
        got = measure.estimate((easy, hard)[i][0][1])
        assert got.high - got.low <= 0.011 * got.value


def test_one_sample_fails_alone_and_batches_do_not_matter() -> None:
    j = torch.stack([factor(m) for m in mixed_batch()])
    clean = quadrature(j, depth=6)
    broken = quadrature(RecordingFactor(j, fail=(1, 5)), depth=6)
    assert broken[1] is None
    values, _ = trace(RecordingFactor(j, fail=(1, 5)))
    assert values.isnan().tolist() == [False, True, False, False, False]
    for i in (0, 2, 3, 4):
        alone = quadrature(j[i], depth=6)[0]
        for moment, function in functions(1.0).values():
            kind = {"moment": moment}
            got = [m.estimate(function, **kind) for m in (clean[i], broken[i], alone)]  # type: ignore[union-attr,arg-type]
            for other in got[1:]:
                # A standard error near zero is the root of a difference of equals.
                near = {"rel": 1e-9, "abs": 1e-6 * abs(got[0].value) + 1e-12}
                assert tuple(other) == pytest.approx(tuple(got[0]), **near)


def test_rescaled() -> None:
    j = factor(rotated(network_like(30, 1e2)))
    big, small = quadrature(1e20 * j)[0], quadrature(j)[0]
    assert big is not None
    assert small is not None
    back = big.scaled(1e-40)
    for ours, theirs in (
        (back.trace(), small.trace()),
        (back.estimate(torch.log1p), small.estimate(torch.log1p)),
    ):
        assert tuple(ours) == pytest.approx(tuple(theirs), rel=1e-9)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="got probes=1 and depth=20"):
        quadrature(torch.eye(3), probes=1)
    with pytest.raises(ValueError, match="probes is 1, expected at least 2"):
        trace(torch.eye(3), probes=1)
