"""Formulas and statuses on spectra that are made up, where every digit is known."""

from __future__ import annotations

import math

import pytest
import torch

from leakwatch.scores import SampleSpectrum, Settings, Status, Value, get
from leakwatch.scores.i2f import psnr
from leakwatch.scores.measure.sample_spectrum import Precision
from leakwatch.scores.result import judged
from leakwatch.status import STATUS_WORDS

NAN = Value(math.nan, Status("undefined", "why not"))


def spectrum(eigenvalues: list[float] | None = None, **known: object) -> SampleSpectrum:
    lam = (
        None if eigenvalues is None else torch.tensor(eigenvalues, dtype=torch.float64)
    )
    fields: dict[str, object] = {
        "d_x": 2 if lam is None else len(lam),
        "loss_of": lambda: Value(1.0),
        "grad_norm": Value(1.0),
        "lambda_max": Value(4.0 if lam is None else float(lam[0])),
        "lambda_min": Value(1.0),
        "cos_max": Value(2.0),
        "cos_min": Value(0.25),
        "trace": Value(5.0 if lam is None else float(lam.sum())),
        "eigenvalues": lam,
        "rank": 2 if lam is None else len(lam),
        **known,
    }
    return SampleSpectrum(**fields)  # type: ignore[arg-type]


def value(name: str, known: SampleSpectrum, **settings: float) -> Value:
    return get(name).compute(known, Settings(**{"noise_std": 0.5, **settings}))  # type: ignore[arg-type]


def test_by_hand() -> None:
    known = spectrum([4.0, 1.0])
    assert value("i2f", known).number == pytest.approx(0.5 * math.sqrt(1.25))
    assert value("i2f", known, epsilon=1.0).number == pytest.approx(
        0.5 * math.sqrt(4 / 25 + 1 / 4)
    )
    assert value("i2f_nom", known).number == pytest.approx(0.5 * math.sqrt(5))
    assert value("i2f_lb", known).number == pytest.approx(0.125 * math.sqrt(5))
    assert value("i2f_bayes", known, prior_std=1.0).number == pytest.approx(
        math.sqrt(0.25 / 4.25 + 0.25 / 1.25)
    )
    assert value("leaked_bits", known, prior_std=1.0).number == pytest.approx(
        0.5 * math.log2(17 * 5)
    )
    assert value("fisher_information_loss", known).number == pytest.approx(4.0)
    assert value("lavp_fusion", known).number == pytest.approx(1.0)
    assert value("jacobian_norm", known).number == pytest.approx(math.sqrt(5))


def test_lower_bound_is_below_the_exact_score() -> None:
    known = spectrum([4.0, 1.0, 1e-3])
    assert value("i2f_lb", known).number < value("i2f", known).number


def test_fusion_takes_the_worse_status() -> None:
    rough = Value(4.0, Status("estimated", "roughly"))
    bound = Value(4.0, Status("not converged", "a bound"))
    assert value("lavp_fusion", spectrum(lambda_max=rough)).status.reason == "roughly"
    assert value("lavp_fusion", spectrum(lambda_max=rough, cos_min=NAN)) == NAN
    assert value("lavp_fusion", spectrum(lambda_max=NAN, cos_min=rough)) == NAN
    fused = value("lavp_fusion", spectrum(lambda_max=bound))
    assert math.isnan(fused.number)
    assert fused.status.word == "not converged"


def test_lower_bound_takes_the_worse_status() -> None:
    rough = Value(4.0, Status("estimated", "roughly"))
    bound = Value(4.0, Status("not converged", "a bound"))
    assert value("i2f_lb", spectrum(trace=rough)).status.word == "estimated"
    for known in (spectrum(lambda_max=bound), spectrum(lambda_max=bound, trace=rough)):
        result = value("i2f_lb", known)
        assert math.isnan(result.number)
        assert result.status.word == "not converged"


def test_psnr() -> None:
    assert psnr(Value(2.8), 784, 1.0).number == pytest.approx(20.0)
    assert psnr(Value(2.8 * 255), 784, 255.0).number == pytest.approx(20.0)
    assert psnr(Value(0.0), 784, 1.0).status.word == "undefined"
    assert psnr(NAN, 784, 1.0) == NAN
    rough = Status("estimated", "roughly")
    assert psnr(Value(2.8, rough), 784, 1.0).status == rough


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (1.9, 2.1, "ok"),
        (1.0, 2.0, "estimated"),
        (2.0, 4.0, "estimated"),
        (0.0, 4.1, "unresolved"),
        (2.0, math.inf, "unresolved"),
    ],
)
def test_judged(low: float, high: float, word: str) -> None:
    found = judged(2.0, low, high, "it")
    assert found.status.word == word
    assert math.isnan(found.number) == (word == "unresolved")
    assert judged(0.0, 0.0, 0.0, "it") == Value(0.0)
    assert judged(math.inf, 1.0, math.inf, "it").status.word == "unresolved"


def test_precision_bounds_contain_what_rounding_does() -> None:
    """Random errors of relative size eps in the entries of J, for many J."""
    generator = torch.Generator().manual_seed(0)
    eps = float(torch.finfo(torch.float32).eps)
    for trial in range(20):
        scales = torch.logspace(0, -trial / 4, 12).double()
        j = torch.randn(40, 12, generator=generator).double() * scales
        noisy = j.float().double() * (
            1 + eps * torch.randn(40, 12, generator=generator)
        )
        true = torch.linalg.svdvals(j).square()
        got = torch.linalg.eigvalsh(noisy.T @ noisy).flip(0).clamp_min(0)
        low, high = Precision.of_matrix(float(got[0]), 12, eps).bounds(got, 12)
        assert bool(((low <= true) & (true <= high)).all())


def test_bounds_are_exact_where_dimension_says_zero() -> None:
    lam = torch.tensor([1.0, 0.5, 0.0]).double()
    low, high = Precision(absolute=0.01).bounds(lam, rank=2)
    assert low.tolist() == pytest.approx([0.99, 0.49, 0.0])
    assert high.tolist() == pytest.approx([1.01, 0.51, 0.0])


def test_an_unresolved_eigenvalue_matters_only_to_scores_that_see_it() -> None:
    known = spectrum([4.0, 1e-9], precision=Precision(absolute=1e-6))
    assert value("i2f", known).status.word == "unresolved"
    assert value("i2f", known, epsilon=1e-2).status.word == "ok"
    assert value("i2f_bayes", known).status.word == "ok"
    # With little noise the prior no longer covers that direction.
    assert value("i2f_bayes", known, noise_std=1e-6).status.word == "unresolved"
    assert value("leaked_bits", known).status.word == "ok"
    assert value("noise_std_for_psnr", known, target_psnr=12.0).status.word == "ok"
    assert (
        value("noise_std_for_psnr", known, target_psnr=60).status.word == "unresolved"
    )


def test_damping_between_the_bounds_of_an_eigenvalue() -> None:
    """λ/(λ+ε)² is largest at λ = ε, which both ends of the interval may miss."""
    # Ends that add 2 % to the sum, and a maximum between them that multiplies it.
    known = spectrum([4.0] * 1000 + [0.0], precision=Precision(absolute=0.1))
    assert value("i2f", known, epsilon=1e-4).status.word == "unresolved"
    assert value("i2f", known, epsilon=1.0).status.word == "ok"


def test_tiny_eigenvalues_do_not_underflow() -> None:
    known = spectrum([1e-200, 1e-210])
    expected = 0.5 * math.sqrt(1e200 + 1e210)
    assert value("i2f", known).number == pytest.approx(expected)
    # Damping between the two: λ/(λ+ε)² is 1/λ for one and λ/ε² for the other.
    damped = value("i2f", known, epsilon=1e-205).number
    assert damped == pytest.approx(0.5 * math.sqrt(2e200), rel=1e-4)


def test_status_words() -> None:
    assert [w for w in STATUS_WORDS if Status(w).usable] == ["ok", "estimated"]
    assert str(Status("failed", "boom")) == "failed: boom"
