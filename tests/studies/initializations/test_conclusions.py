"""What a comparison of initialisations says first."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from leakwatch.reporting import Quantity
from leakwatch.studies import InitializationComparison
from leakwatch.studies.initializations.points import Point
from leakwatch.studies.paper_attacks import squared_error

NAME = "i2f_range_psnr"


def comparison(
    means: Mapping[str, float], errors: Mapping[str, float], matched: int = 8
) -> InitializationComparison:
    """Eight samples under two seeds; of each scheme so many attacks matched."""
    points = []
    for scheme, mean in means.items():
        spread = np.random.default_rng(1).normal(0, 0.3, (2, 8))
        for seed in range(2):
            for i in range(8):
                where = (scheme, seed, "initial", i, i % 2)
                points.append(Point(*where, NAME, mean + float(spread[seed, i])))
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
