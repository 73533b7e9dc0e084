"""What a trade-off says first."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from leakwatch import Status
from leakwatch.studies import TradeOff
from leakwatch.studies.trade_offs.conclusions import conclude, lead_of
from leakwatch.studies.trade_offs.report import trade_off_figure
from leakwatch.studies.trade_offs.rows import Overview
from leakwatch.studies.trade_offs.table import text_table
from studies.trade_offs.test_table import cell, trade_off

NAN = math.nan


def said(found: Overview) -> list[str]:
    return [answer for _, answer in conclude(found)]


def test_the_prediction_leads_where_attacks_are_few() -> None:
    found = trade_off(
        cell("gaussian", [30.0, NAN], predicted=26.0),
        replace(
            cell("gaussian", [15.0, NAN], budget=0.5, predicted=18.0), accuracy=0.8
        ),
        replace(cell("pruning", [9.0, NAN], budget=0.5, predicted=12.0), accuracy=0.7),
    )
    assert lead_of(found).name == "adaptive_predicted_psnr"
    cost, attacks = said(found)
    assert cost == (
        "gaussian 0.5 relative: at most 18.0 dB (predicted PSNR of the adaptive "
        "attacker) at an accuracy of 80.0%, 10.0 points less than without a defense. "
        "Without a defense it is exactly the image."
    )
    assert attacks.startswith(
        "They could not: 4 of 7 adaptive attacks conclusive, and it takes 8."
    )


def test_enough_conclusive_attacks_lead() -> None:
    plain = cell("none", [58.0] * 8, budget=0.0, predicted=58.5)
    noisy = cell("gaussian", [*[14.0] * 7, 19.0], predicted=16.0)
    found = TradeOff((plain, noisy), ("naive",), "relative").overview
    assert lead_of(found).name == "naive_psnr"
    cost, attacks = said(found)
    assert cost.startswith(
        "gaussian 0.1 relative: at most 19.0 dB (PSNR that the naive attacker "
        "achieved) at an accuracy of 90.0%, 0.0 points less"
    )
    assert attacks == (
        "16 of 16 naive attacks conclusive. In no setting did the median exceed its "
        "prediction by 1 dB."
    )
    beaten = cell("gaussian", [19.0] * 8, predicted=16.0)
    found = TradeOff((plain, beaten), ("naive",), "relative").overview
    assert (
        "better than predicted, by up to 3.0 dB in the median (gaussian 0.1"
        in (said(found)[1])
    )


def test_nothing_that_holds_is_called_so() -> None:
    cost, _ = said(trade_off(cell("gaussian", [30.0], predicted=31.0)))
    assert cost.startswith("Nothing that was tried. The least exposing is gaussian 0.1")
    unknown = cell("gaussian", [NAN], predicted=NAN)
    cost, _ = said(TradeOff((unknown,), ("naive",), "relative").overview)
    assert (
        cost == "Nothing is known of any defense, which does not say that it is safe."
    )


def test_what_failed_attacks_leave_open_holds_nothing() -> None:
    plain = cell("none", [58.0] * 9, budget=0.0, predicted=58.5)
    noisy = cell("gaussian", [*[14.0] * 8, NAN], predicted=16.0)
    found = TradeOff((plain, noisy), ("naive",), "relative").overview
    assert lead_of(found).name == "naive_psnr"
    cost, _ = said(found)
    assert cost.startswith(
        "Not known of anything that was tried. gaussian 0.1 relative reaches at least "
        "14.0 dB: of 1 of 9 messages it is not known, which is not safe."
    )
    more = cell("gaussian", [12.0] * 9, budget=0.5, predicted=12.0)
    found = TradeOff((plain, noisy, more), ("naive",), "relative").overview
    cost, _ = said(found)
    assert cost.startswith("gaussian 0.5 relative: at most 12.0 dB")
    assert "gaussian 0.1 relative reaches at least 14.0 dB" in cost
    worse = cell("gaussian", [*[34.0] * 8, NAN], predicted=16.0)
    cost, _ = said(TradeOff((plain, worse), ("naive",), "relative").overview)
    assert "whose most exposed message reaches at least 34.0 dB" in cost


def test_a_run_that_failed_leaves_it_open() -> None:
    broken = replace(cell("gaussian", [], predicted=NAN), status=Status("failed", "x"))
    good = cell("gaussian", [9.0], predicted=12.0)
    cost, _ = said(TradeOff((good, broken), ("naive",), "relative").overview)
    assert "at least 12.0 dB: 1 of 2 runs failed, which is not safe" in cost


def test_predictions_that_are_missing_are_counted() -> None:
    known, unknown = (cell("gaussian", [9.0], predicted=p) for p in (12.0, NAN))
    found = TradeOff((known, unknown), ("naive",), "relative").overview
    assert "at least 12.0 dB: of 1 of 2 messages it is not known" in said(found)[0]
    assert "12.0 (1 of 2)" in text_table(found)
    (row,) = found.rows
    assert row.flat()["naive_unpredicted"] == 1


def test_a_prediction_that_is_a_bound_holds_nothing_and_says_so() -> None:
    noisy = cell("gaussian", [14.0] * 2, predicted=16.0)
    for attacked in noisy.attacked:
        for who, outcome in attacked.outcomes.items():
            attacked.outcomes[who] = replace(outcome, at_least=True)
    plain = cell("none", [58.0] * 2, budget=0.0, predicted=58.5)
    found = TradeOff((plain, noisy), ("naive",), "relative").overview
    assert (
        "reaches at least 16.0 dB: of 2 of 2 messages it is a bound" in (said(found)[0])
    )
    assert "≥ 16.0" in text_table(found)
    assert "58.5" in text_table(found)
    assert "≥ 58.5" not in text_table(found)
    assert "exposure is at least that" in text_table(found)
    pytest.importorskip("plotly")
    figure = trade_off_figure(found)
    predicted = [t for t in figure.data if t.name == "gaussian" and t.y == (16.0,)]
    assert [t.marker.symbol for t in predicted] == [("triangle-up",)]
    assert "a caret is a bound" in figure.layout.title.subtitle.text
