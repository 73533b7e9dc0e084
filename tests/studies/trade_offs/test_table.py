"""What the table and the page of a trade-off say, and that they fit a window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from leakwatch import Status
from leakwatch.studies import Applied, Attacked, Cell, Outcome, TradeOff
from leakwatch.studies.trade_offs.outcomes import ATTACKERS, Attacker
from leakwatch.studies.trade_offs.predictions import CEILING
from leakwatch.studies.trade_offs.report import trade_off_figure, trade_off_page
from leakwatch.studies.trade_offs.rows import Overview
from leakwatch.studies.trade_offs.table import columns, headings, notes

SHORT = Status("not converged", "too few steps")


def cell(
    defense: str,
    psnr: Sequence[float],
    *,
    budget: float = 0.1,
    predicted: float = 21.0,
    coefficient: float | None = None,
) -> Cell:
    """Messages of which attackers recover as much; NaN: not matched."""

    def outcome(value: float) -> Outcome:
        if math.isnan(value):
            return Outcome.without(SHORT, predicted)
        return Outcome(value, 0.3, predicted)

    attacked = tuple(
        Attacked(i, i, 1.0, 0.1, {who: outcome(value) for who in ATTACKERS})
        for i, value in enumerate(psnr)
    )
    applied = Applied(3, 0.1, 0.1, 0.1) if defense != "none" else None
    return Cell(defense, budget, 0, 0.9, attacked, applied, coefficient=coefficient)


def trade_off(*cells: Cell, attackers: tuple[Attacker, ...] = ATTACKERS) -> Overview:
    plain = cell("none", [58.0], budget=0.0, predicted=CEILING)
    settings = {"attack": "gauss-newton", "box": 0.123456789, "queries": 1}
    return TradeOff((plain, *cells), attackers, "relative", settings).overview


def test_all_columns_have_names_of_their_own() -> None:
    found = trade_off(cell("gaussian", [20.0]))
    head, lines = columns(found)
    assert len(set(head)) == len(head)
    assert len(set(headings(found))) == len(head)
    assert all(len(line) == len(head) for line in lines)
    for who in ATTACKERS:
        assert [h for h in head if h.startswith(who)] == [
            f"{who} median, dB",
            f"{who} worst, dB",
            f"{who} predicted, dB",
            f"{who} LPIPS",
        ]


def test_only_attackers_who_were_there_are_explained() -> None:
    mixed = cell("mixup", [20.0], budget=math.nan, coefficient=0.7)
    for attackers in (("naive",), ("naive", "adaptive"), ATTACKERS):
        found = trade_off(mixed, attackers=attackers)
        said = " ".join(notes(found)) + trade_off_page(found).split("<main>")[1]
        for who in ATTACKERS:
            assert (who in said) == (who in attackers), (who, attackers)
    assert "share of the sample in a mixture" in said
    assert not any("mixture" in note for note in notes(trade_off()))


def test_what_some_attacks_give_says_so() -> None:
    nan = math.nan
    found = trade_off(
        cell("gaussian", [30.0, nan, 20.0]),
        cell("gaussian", [nan, 10.0, nan], budget=0.2),
        cell("pruning", [12.0, 14.0, 16.0]),
        attackers=("naive",),
    )
    head, lines = columns(found)
    at = head.index("naive median, dB")
    shown = [line[at : at + 2] for line in lines]
    assert shown == [
        ["58.0", "58.0"],
        ["25.0 (2 of 3)", "≥ 30.0"],
        ["not known", "≥ 10.0"],
        ["14.0", "16.0"],
    ]
    said = notes(found)
    assert sum("(1 of 2) and ≥" in note for note in said) == 1
    matched = [note for note in said if "did not match 2 of 3 messages" in note]
    assert len(matched) == 1
    assert matched[0].startswith("gaussian at 0.200")
    assert not any("≥" in note for note in notes(trade_off()))


def test_hollow_points_leave_failed_attacks_out() -> None:
    found = trade_off(
        cell("gaussian", [30.0, math.nan, 20.0]),
        cell("gaussian", [10.0, 12.0, 14.0], budget=0.2),
        attackers=("naive",),
    )
    figure = trade_off_figure(found)
    traces = [trace for trace in figure.data if trace.name == "gaussian"]
    assert [list(trace.marker.symbol) for trace in traces] == [
        ["circle", "circle"],  # predicted, which leads
        ["circle-open", "circle"],
        ["circle-open", "circle"],
    ]
    assert [trace.visible for trace in traces] == [True, False, False]
    bars = traces[1].error_y
    assert (list(bars.array), list(bars.arrayminus)) == ([5.0, 2.0], [5.0, 2.0])
    assert "hollow" in figure.layout.title.subtitle.text
    assert figure.layout.xaxis.title.text == "accuracy"
    assert "hollow" not in trade_off_figure(trade_off()).layout.title.subtitle.text


def test_an_exact_prediction_is_no_number_of_decibels() -> None:
    found = trade_off(cell("gaussian", [20.0]), attackers=("naive",))
    head, lines = columns(found)
    at = head.index("naive predicted, dB")
    assert [line[at] for line in lines] == ["exact", "21.0"]
    assert sum(note.startswith("exact:") for note in notes(found)) == 1
    drawn = [
        y
        for trace in trade_off_figure(found).data
        for y in trace.y
        if y is not None and trace.visible
    ]
    assert max(drawn) == 60.0
    assert "60 dB: or more" in trade_off_figure(found).layout.title.subtitle.text


def test_the_name_of_an_attack_is_text() -> None:
    found = TradeOff(
        (cell("none", [58.0]),), ATTACKERS, "relative", {"attack": "<b>mine"}
    )
    page = trade_off_page(found.overview)
    assert "attacked by &lt;b&gt;mine" in page
    assert "<b>mine" not in page


def private(epsilon: float, delta: float = 1e-5) -> Cell:
    made = cell("dp-sgd", [20.0])
    return replace(made, applied=Applied(3, 0.1, 0.1, 0.1, 0.0, epsilon, delta))


def test_epsilon_stands_beside_what_attacks_find() -> None:
    found = trade_off(private(8.0), cell("gaussian", [20.0]))
    head, lines = columns(found)
    place = head.index("ε at δ = 1e-05")
    assert [line[place] for line in lines] == ["∞", "8.00", "not known"]
    assert len({len(line) for line in lines}) == 1
    assert any("of all of training" in note for note in notes(found))
    assert [row.flat()["epsilon"] for row in found.rows] == [None, 8.0, None]
    assert "at δ = 1e-05" in trade_off_page(found)
    traces = trade_off_figure(found).data
    assert any("ε = 8" in text for t in traces for text in t.customdata)


def test_without_epsilon_there_is_no_column() -> None:
    found = trade_off(cell("gaussian", [20.0]))
    assert not [name for name in columns(found)[0] if "ε" in name]


def test_epsilon_of_several_seeds_is_the_largest_and_all_must_be_known() -> None:
    rows = trade_off(private(8.0), private(7.5)).rows
    assert rows[1].epsilon == 8.0
    rows = trade_off(private(8.0), private(math.nan)).rows
    assert math.isnan(rows[1].epsilon)
