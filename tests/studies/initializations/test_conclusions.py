"""What a comparison of initialisations says first."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import pytest

from leakwatch.reporting import Quantity
from leakwatch.studies import InitializationComparison
from leakwatch.studies.initializations.points import Point
from leakwatch.studies.initializations.ranking import rank
from leakwatch.studies.initializations.report import comparison_page
from leakwatch.studies.paper_attacks import squared_error

NAME = "i2f_range_psnr"


BOUND = "estimated: exposure is at least that: more may be seen"


def comparison(
    means: Mapping[str, float],
    errors: Mapping[str, float],
    matched: int = 8,
    bounds: Collection[str] = (),
) -> InitializationComparison:
    """Eight samples under two seeds; of each scheme so many attacks matched.

    Of the schemes in ``bounds``, one value is a bound.
    """
    points = []
    for scheme, mean in means.items():
        spread = np.random.default_rng(1).normal(0, 0.3, (2, 8))
        for seed in range(2):
            for i in range(8):
                where = (scheme, seed, "initial", i, i % 2)
                bound = scheme in bounds and (seed, i) == (1, 3)
                value = mean + float(spread[seed, i])
                points.append(Point(*where, NAME, value, BOUND if bound else "ok"))
                if scheme in errors:
                    good = seed == 0 and i < matched
                    error = errors[scheme] if good else 0.5
                    points.append(
                        Point(*where, "gs_mse", error, repeat=0, matched=good)
                    )
    return InitializationComparison(
        points=tuple(points),
        schemes=tuple(means),
        seeds=(0, 1),
        samples=tuple(range(8)),
        quantities={
            NAME: Quantity(NAME, "dB", "higher = more exposed"),
            **({"gs_mse": squared_error("gs")} if errors else {}),
        },
        settings={"noise_std": 0.01, "data_range": 1.0},
    )


def test_who_exposes_least_and_that_attacks_confirm_it() -> None:
    found = comparison(
        {"normal": 41.0, "he": 30.0, "xavier": 11.8}, {"normal": 1e-4, "xavier": 0.1}
    )
    said = found.conclusion()
    assert "xavier exposes least: 11.8 dB against 41.0 dB for normal" in said
    assert "who knows the range of pixels and mean and spread of the pixels" in said
    assert "Attacks confirm it: 10.0 dB on xavier, 40.0 dB on normal (16 of 32" in said
    other = comparison({"normal": 41.0, "xavier": 11.8}, {"normal": 0.1, "xavier": 0.1})
    assert "Attacks do not confirm it: 10.0 dB on xavier" in other.conclusion()


def test_few_conclusive_attacks_confirm_nothing_and_have_no_interval() -> None:
    found = comparison(
        {"normal": 41.0, "xavier": 11.8}, {"normal": 1e-4, "xavier": 0.1}, matched=1
    )
    assert "Attacks could not confirm it: 2 of 32 gs attacks matched." in (
        found.conclusion()
    )
    verdict = found.verdict("gs_mse")
    assert verdict.apart == frozenset()
    assert all(np.isnan([r.low, r.high]).all() for r in verdict.ranked)
    assert "too few for an interval" in verdict.notes[-1]
    assert not np.isnan(found.verdict().ranked[0].low)


def test_what_is_not_told_apart_is_not_ranked_in_words() -> None:
    said = comparison({"normal": 20.0, "xavier": 20.01}, {}).conclusion()
    assert said.startswith("No initialisation is shown to expose less than another")
    assert said.endswith("No attack was run to confirm it.")


def test_who_may_expose_as_little_is_named() -> None:
    said = comparison({"normal": 41.0, "he": 11.81, "xavier": 11.8}, {}).conclusion()
    assert said.startswith(
        "xavier exposes least, or one that is not told apart from it (he): 11.8 dB "
    )


def test_the_prediction_leads_figure_and_table() -> None:
    pytest.importorskip("plotly")
    found = comparison(
        {"normal": 55.0, "xavier": 11.8}, {"normal": 1e-4, "xavier": 0.1}
    )
    figure = found.figure()
    assert figure.layout.yaxis.title.text.startswith(NAME)
    low, high = figure.layout.yaxis.range
    assert (low, high > 55.0) == (10.0, True)
    assert found.table().splitlines()[0].split()[:2] == ["scheme", NAME]


def test_bounds_say_so_and_are_not_ranked() -> None:
    means = {"normal": 41.0, "he": 30.0, "xavier": 11.8}
    low = comparison(means, {}, bounds=["xavier"])
    verdict = low.verdict()
    # It may be as exposed as any other, or more.
    assert [g.bounds for g in verdict.ranked] == [0, 0, 1]
    assert verdict.apart == {frozenset(("normal", "he"))}
    assert verdict.order == "normal > he ≈ xavier"
    assert np.isnan([verdict.ranked[2].low, verdict.ranked[2].high]).all()
    assert "xavier: ≥ 11.8 dB" in str(verdict)
    assert "1 of 48 values (xavier) are bounds; bounds can't be ranked" in str(verdict)
    said = low.conclusion()
    assert "exposes least" not in said
    assert "at least 11.8 dB for xavier to 41.0 dB for normal" in said
    assert "Bounds can't be ranked" in said
    (row,) = (r for r in low.summary() if r["scheme"] == "xavier")
    assert (row["bounds"], row["low"], row["high"]) == (1, None, None)
    assert "≥ 11.8" in low.table()
    assert "bounds can't be ranked" in low.table()

    # That it is at least 41 dB does tell it apart from what has 12.
    high = comparison(means, {}, bounds=["normal"])
    assert high.verdict().order == "normal > he > xavier"
    said = high.conclusion()
    assert "xavier exposes least: 11.8 dB against at least 41.0 dB for normal" in said
    assert "bounds" not in comparison(means, {}).table()


def test_an_error_that_is_a_bound_is_at_most_that() -> None:
    about = Quantity("i2f", "", "higher = less exposed")
    values = np.array([[[1.0, 1.1, 0.9]], [[3.0, 3.1, 3.2]]])
    bounds = np.zeros(values.shape, bool)
    bounds[1, 0, 0] = True
    verdict = rank(values, ["a", "b"], about, log=False, bounds=bounds)
    assert verdict.order == "a ≈ b"
    assert "b: ≤ 3.10" in str(verdict)
    assert rank(values, ["a", "b"], about, log=False).order == "a > b"
    assert rank(values, ["a", "b"], about, log=False, bounds=bounds[::-1]).order == (
        "a > b"
    )


def test_the_page_marks_bounds() -> None:
    pytest.importorskip("plotly")
    found = comparison({"normal": 41.0, "xavier": 11.8}, {}, bounds=["xavier"])
    dots, means, *levels = found.figure().data
    assert [level.name[:7] for level in levels] == ["clearly", "hardly "]
    assert sorted(set(dots.marker.symbol)) == ["circle", "triangle-up"]
    assert "a caret is a bound" in found.figure().layout.title.subtitle.text
    assert list(means.customdata) == [
        "normal<br>mean 41.0",
        "xavier<br>mean ≥ 11.8",
    ]
    page = comparison_page([found._ranking("initial")], {})
    assert '<td class="num">≥ 11.8<br><small></small></td>' in page
