"""ε of training under a defense, against closed forms."""

from __future__ import annotations

import math
import sys

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from leakwatch.defenses import (
    DPSGD,
    Budget,
    Defense,
    GaussianNoise,
    dp_sgd,
    privacy_loss,
)
from leakwatch.defenses.privacy import Accountant

pytest.importorskip("opacus")

DELTA = 1e-5


def gaussian_epsilon(noise: float, steps: int) -> float:
    """Exact ε of a Gaussian mechanism repeated (Balle & Wang, ICML 2018, Thm. 8)."""
    mu = math.sqrt(steps) / noise

    def excess(epsilon: float) -> float:
        left = norm.cdf(mu / 2 - epsilon / mu)
        right = math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
        return float(left - right - DELTA)

    return float(brentq(excess, 0, 100))


@pytest.mark.parametrize(("noise", "steps"), [(5.0, 10), (1.0, 1), (20.0, 400)])
def test_without_sampling_it_is_that_of_the_gaussian_mechanism(
    noise: float, steps: int
) -> None:
    exact = gaussian_epsilon(noise, steps)
    # The noise on C counts, not C.
    for clip in (0.1, 3.0):
        spent = privacy_loss(
            DPSGD(clip, noise), steps=steps, sample_rate=1.0, delta=DELTA
        )
        # Never below; above by what the accountant is allowed to miss.
        assert exact <= spent.epsilon <= exact + 0.021
        assert spent.status.word == "ok"
    loose = privacy_loss(
        DPSGD(1.0, noise), steps=steps, sample_rate=1.0, delta=DELTA, accountant="rdp"
    )
    assert exact < loose.epsilon < 1.3 * exact


def test_a_sample_of_an_epoch_takes_part_once() -> None:
    found = privacy_loss(
        DPSGD(1.0, 2.0), steps=200, sample_rate=0.025, delta=DELTA, sampling="epochs"
    )
    assert found.epsilon == pytest.approx(gaussian_epsilon(2.0, 5), abs=0.021)
    sampled = privacy_loss(DPSGD(1.0, 2.0), steps=200, sample_rate=0.025, delta=DELTA)
    assert sampled.epsilon < found.epsilon / 3


def test_gaussian_noise_has_one_where_the_sensitivity_is_known() -> None:
    noise = GaussianNoise(Budget(3.0, "std"))
    found = privacy_loss(noise, steps=4, sample_rate=1.0, delta=DELTA, sensitivity=0.5)
    assert found.epsilon == pytest.approx(gaussian_epsilon(6.0, 4), abs=0.021)


def test_large_epsilon_is_added_up_in_the_other_way() -> None:
    for accountant in ("prv", "rdp"):
        kind: Accountant = accountant  # type: ignore[assignment]
        found = privacy_loss(
            DPSGD(1.0, 0.05), steps=9, sample_rate=0.5, delta=DELTA, accountant=kind
        )
        assert found.accountant == "rdp"
        assert 1000 < found.epsilon < math.inf


@pytest.mark.parametrize(
    ("defense", "said"),
    [
        (DPSGD(1.0, 0.0), "noise_multiplier is 0"),
        (GaussianNoise(Budget(0.1)), "follows the gradient"),
        (GaussianNoise(Budget(0.1, "std")), "nothing bounds how much one sample"),
        (GaussianNoise(Budget(0.0, "std")), "there is no noise"),
    ],
)
def test_what_has_none_says_why(defense: Defense, said: str) -> None:
    found = privacy_loss(defense, steps=1, sample_rate=1.0, delta=DELTA)
    assert math.isnan(found.epsilon)
    assert found.status.word == "undefined"
    assert said in found.status.reason


def test_without_opacus_it_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    found = privacy_loss(DPSGD(1.0, 1.0), steps=1, sample_rate=1.0, delta=DELTA)
    assert found.status.word == "not computed"
    assert "lightning-leakwatch[dp]" in found.status.reason


def test_the_noise_of_dp_sgd_has_a_unit() -> None:
    assert dp_sgd(Budget(1.5, "std"), clip=3.0) == DPSGD(3.0, 0.5)
    with pytest.raises(ValueError, match="not 'relative'"):
        dp_sgd(Budget(1.5))


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"sample_rate": 1.5}, {"delta": 0.0}, {"sampling": "all"}]
)
def test_arguments_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    right: dict[str, object] = {"steps": 1, "sample_rate": 0.5, "delta": DELTA}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        privacy_loss(DPSGD(1.0, 1.0), **(right | wrong))  # type: ignore[arg-type]
