"""What is said of all attacks of an audit: shares, correlations, one sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import pytest
from reporting.audits import attacked, scored
from scipy import stats

from leakwatch.callbacks._audit.conclusions import conclusions, sentence
from leakwatch.reporting import Row

GOOD = [True, True, False, True, True, False]
PSNR = [30.0, 20.0, 40.0, 10.0, 26.0, 5.0]
SCORE = [3.0, 5.0, 1.0, 2.0, 4.0, 6.0]


def concluded(
    good: Sequence[bool],
    psnr: Sequence[float] = PSNR,
    metrics: Sequence[str] = ("psnr",),
) -> dict[str, Row]:
    rows = attacked("random", psnr, good) + scored({"i2f": SCORE})
    found = conclusions(rows, ["i2f"], ["near", "random"], metrics, epoch=1, step=10)
    return {row.quantity: row for row in found}


def test_correlations_are_of_conclusive_attacks() -> None:
    row = concluded(GOOD)["audit/spearman/i2f/random/psnr"]
    keep = np.array(GOOD)
    rho = stats.spearmanr(np.array(SCORE)[keep], np.array(PSNR)[keep]).statistic
    every = stats.spearmanr(SCORE, PSNR).statistic
    assert rho == pytest.approx(0.2)
    assert every == pytest.approx(-23 / 35)
    assert row.value == pytest.approx(rho, abs=1e-12)
    assert row.status.startswith("estimated: +0.20 [")
    assert "n = 4" in row.status
    assert "2 of 6 samples left out, whose attack was inconclusive" in row.status
    assert row.status.endswith("-0.66 with them (n = 6)")


def test_nothing_is_left_out_of_conclusive_attacks() -> None:
    row = concluded([True] * 6)["audit/spearman/i2f/random/psnr"]
    assert row.value == pytest.approx(-23 / 35)
    assert "n = 6" in row.status
    assert "left out" not in row.status


@pytest.mark.parametrize("clear", [0, 2])
def test_no_correlation_of_attacks_that_failed(clear: int) -> None:
    row = concluded([i < clear for i in range(6)])["audit/spearman/i2f/random/psnr"]
    assert math.isnan(row.value)
    assert row.status.startswith("undefined")
    assert f"{6 - clear} of 6 samples left out" in row.status
    assert "-0.66 with them" in row.status


def test_a_quality_that_was_not_measured_is_not_an_attack_that_failed() -> None:
    rows = attacked("random", PSNR, [True, True, True, True, True, False])
    rows += [
        Row(1, 10, i, i, "audit/random/ssim", math.nan, "not computed: no window")
        for i in range(6)
    ]
    rows += scored({"i2f": SCORE})
    found = conclusions(rows, ["i2f"], ["random"], ("ssim",), epoch=1, step=10)
    row = next(r for r in found if "spearman" in r.quantity)
    assert row.status.startswith("undefined")
    assert "inconclusive" not in row.status


def test_shares_are_of_conclusive_attacks() -> None:
    found = concluded(GOOD)
    assert found["audit/random/conclusive"].value == pytest.approx(4 / 6)
    assert found["audit/random/recovered"].value == 2 / 4
    status = found["audit/random/recovered"].status
    assert status == (
        "estimated: of 4 samples whose attack was conclusive; inconclusive for 2 of 6"
    )
    assert concluded([True] * 6)["audit/random/recovered"].status == "ok"
    none = concluded([False] * 6)
    assert none["audit/random/conclusive"].value == 0.0
    assert math.isnan(none["audit/random/recovered"].value)
    assert not any(name.startswith("audit/near") for name in found)


def test_the_sentence_counts_and_quotes_no_failed_attack() -> None:
    rows = attacked("near", PSNR, GOOD) + attacked("random", PSNR, [False] * 6)
    rows.append(Row(1, 10, None, None, "seconds", 2.0))
    said = sentence(rows, ["near", "random"])
    assert said is not None
    assert said == (
        "leakwatch audit, epoch 1 (step 10): near start: 23.0 dB median PSNR, 2 of 4 "
        "recovered, 1 partly, 2 more inconclusive; random start: no attack on 6 "
        "samples was conclusive, which shows no safety; 2.0 s"
    )
    assert re.findall(r"\d+\.\d dB", said) == ["23.0 dB"]
    assert sentence(rows[-1:], ["near"]) is None
