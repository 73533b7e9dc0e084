from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from leakwatch.reporting import (
    Quantity,
    RiskLedger,
    Row,
    class_bars,
    eigenvalue_histogram,
    quantities_from_metadata,
    risk_over_epochs,
    spectrum_by_rank,
    time_spent,
)

pytest.importorskip("plotly")

MORE = {"q": Quantity("q", "dB", "higher = more exposed")}


def named(figure: Any, name: str) -> Any:
    return next(trace for trace in figure.data if trace.name == name)


def rows(epochs: tuple[int, ...] = (0, 1), status: str = "ok") -> list[Row]:
    return [
        Row(epoch, 10 * epoch, sample, sample % 2, "q", 10.0 * sample + epoch, status)
        for epoch in epochs
        for sample in (1, 2, 3)
    ]


def test_risk_draws_median_band_and_worst_samples() -> None:
    figure = risk_over_epochs(rows(), MORE, ["cat", "dog"], worst=2)
    assert list(named(figure, "median").x) == [0, 1]
    assert list(named(figure, "median").y) == [20.0, 21.0]
    assert list(named(figure, "5–95 %").y) == pytest.approx([29.0, 30.0])
    assert list(named(figure, "#3 · dog").y) == [30.0, 31.0]
    assert list(named(figure, "#2 · cat").y) == [20.0, 21.0]
    assert "#1 · dog" not in [trace.name for trace in figure.data]
    assert figure.layout.yaxis.title.text == "q [dB]<br><i>higher = more exposed</i>"
    assert figure.layout.xaxis.title.text == "completed epochs"


def test_repeated_epochs_are_drawn_by_step() -> None:
    data = [Row(0, step, 1, None, "q", float(step)) for step in (5, 10)]
    figure = risk_over_epochs(data)
    assert list(named(figure, "median").x) == [5, 10]
    assert figure.layout.xaxis.title.text == "optimizer steps"


def test_unusable_values_are_gaps_not_zeros() -> None:
    data = [*rows((0,)), *rows((1,), "failed: x"), *rows((2,))]
    figure = risk_over_epochs(data, MORE)
    assert list(named(figure, "median").y) == [20.0, None, 22.0]
    assert list(named(figure, "#3 · class 1").y) == [30.0, None, 32.0]


def test_nothing_usable_is_said_in_the_figure() -> None:
    figure = risk_over_epochs(rows(status="unresolved: floor"), MORE)
    assert "3 unresolved" in figure.layout.annotations[0].text
    bars = class_bars(rows(status="unresolved: floor"), MORE)
    assert "not safe" in bars.layout.annotations[0].text
    assert list(bars.data[0].x) == [None, None]


def test_one_probe_gets_error_bars_instead_of_a_band() -> None:
    figure = risk_over_epochs(rows((4,)), MORE)
    assert list(named(figure, "median").error_y.array) == pytest.approx([9.0])
    assert "5–95 %" not in [trace.name for trace in figure.data]


def test_the_headline_quantity_is_shown_first_and_the_menu_switches() -> None:
    data = [
        Row(0, 0, 1, 0, name, value)
        for name, value in (("i2f", 2.0), ("i2f_psnr", 20.0), ("i2f_bayes_psnr", 22.0))
    ]
    figure = risk_over_epochs(data)
    buttons = figure.layout.updatemenus[0].buttons
    assert [b.label for b in buttons] == ["i2f_bayes_psnr", "i2f_psnr", "i2f"]
    shown = [trace.visible for trace in figure.data]
    assert tuple(shown) == tuple(buttons[0].args[0]["visible"])
    # A median; of a PSNR its sample and the names of two levels too.
    assert [sum(button.args[0]["visible"]) for button in buttons] == [4, 4, 1]
    assert buttons[2].args[1]["yaxis.title.text"] == "i2f"
    assert len(figure.layout.shapes) == 2
    assert buttons[2].args[1]["shapes"] == []


def test_wide_positive_ranges_get_a_logarithmic_axis() -> None:
    wide = [Row(0, 0, i, 0, "lavp", 10.0**i) for i in range(5)]
    assert risk_over_epochs(wide).layout.yaxis.type == "log"
    zero = [*wide, Row(0, 0, 9, 0, "lavp", 0.0)]
    assert risk_over_epochs(zero).layout.yaxis.type == "linear"


def test_classes_are_ranked_by_exposure() -> None:
    data = [Row(0, 0, i, i, "q", value) for i, value in enumerate((5.0, 9.0, 1.0))]
    more = class_bars(data, MORE, ["a", "b", "c"])
    assert list(more.layout.yaxis.ticktext) == ["c", "a", "b"]
    assert list(more.data[0].x) == [1.0, 5.0, 9.0]
    assert list(more.data[1].y) == [1, 2, 0]
    less = {"q": Quantity("q", "", "higher = less exposed")}
    figure = class_bars(data, less, ["a", "b", "c"])
    assert list(figure.layout.yaxis.ticktext) == ["b", "a", "c"]


def test_a_class_without_a_usable_value_is_named_at_the_bottom() -> None:
    data = [Row(0, 0, 0, 0, "q", 3.0), Row(0, 0, 1, 1, "q", 99.0, "failed: x")]
    figure = class_bars(data, MORE, ["a", "b"])
    assert list(figure.layout.yaxis.ticktext) == ["b: not known", "a"]
    assert list(figure.data[0].x) == [None, 3.0]


def test_names_are_escaped_and_cut() -> None:
    name = "<script>alert(1)</script> & a very long name"
    data = [Row(0, 0, 0, 0, "<b>", 3.0), Row(0, 0, 1, 0, "i2f_psnr", 3.0)]
    for figure in (class_bars(data, {}, [name]), risk_over_epochs(data, {}, [name])):
        content = figure.to_json()
        assert "<script" not in content
        assert "\\u003cscript" not in content
        assert figure.layout.updatemenus[0].buttons[1].label == "&lt;b&gt;"


def test_nothing_to_draw_is_none() -> None:
    assert risk_over_epochs([]) is None
    assert class_bars([Row(0, 0, 1, None, "q", 1.0)]) is None
    assert time_spent(rows()) is None
    assert spectrum_by_rank([]) is None
    nothing = {"eigenvalues": np.full((2, 3), np.nan), "epoch": 0}
    assert spectrum_by_rank([nothing]) is None
    assert eigenvalue_histogram([{"eigenvalues": np.zeros(3)}]) is None


def test_time_shows_seconds_and_total() -> None:
    data = [
        Row(0, 0, None, None, "seconds", 1.0),
        Row(1, 9, None, None, "seconds", 2.0),
        Row(1, 9, None, None, "time_fraction", 0.125),
        Row(2, 18, None, None, "seconds", math.nan, "failed: x"),
    ]
    figure = time_spent(data)
    assert list(figure.data[0].y) == [1.0, 2.0]
    assert "3.00 s in 2 probe steps" in figure.layout.title.subtitle.text
    assert figure.data[0].customdata[1].startswith("12.5%")


def spectra(*epochs: int) -> list[dict[str, Any]]:
    return [
        {
            "eigenvalues": np.array([[100.0, 1.0, 1e-9], [1000.0, 10.0, 1e-9]]),
            "epoch": np.array(epoch),
            "step": np.array(epoch),
            "floor": np.array([1e-6, 1e-6]),
        }
        for epoch in epochs
    ]


def test_spectrum_shows_first_middle_and_last() -> None:
    figure = spectrum_by_rank(spectra(4, 0, 1, 2, 3))
    lines = [trace for trace in figure.data if trace.name]
    assert [t.name for t in lines] == [
        "before training",
        "after epoch 2",
        "after epoch 4",
    ]
    assert list(lines[0].x) == [1, 2]
    assert list(lines[0].y) == [550.0, 5.5]
    assert figure.layout.yaxis.type == "log"
    assert "6 of 18 values are unresolved" in figure.layout.title.subtitle.text


def test_histogram_counts_resolved_eigenvalues() -> None:
    figure = eigenvalue_histogram(spectra(0))
    assert sum(figure.data[0].y) == pytest.approx(1.0)
    assert max(figure.data[0].y) == pytest.approx(0.25)


def test_long_spectra_are_thinned_and_keep_their_ends() -> None:
    values = np.linspace(3072.0, 1.0, 3072)[None]
    figure = spectrum_by_rank([{"eigenvalues": values, "epoch": 0}])
    [line] = [trace for trace in figure.data if trace.name]
    assert (line.x[0], line.x[-1]) == (1, 3072)
    assert len(line.x) <= 300


def test_equal_eigenvalues_have_a_histogram() -> None:
    figure = eigenvalue_histogram([{"eigenvalues": np.ones((2, 2)), "epoch": 0}])
    assert sum(figure.data[0].y) == pytest.approx(1.0)


def test_figures_are_valid_json_without_nan(
    make_run: Callable[..., RiskLedger],
) -> None:
    ledger = make_run(status=lambda name, place: "failed: x" if place % 2 else None)
    quantities = quantities_from_metadata(ledger.read_metadata())
    for figure in (
        risk_over_epochs(ledger.rows(), quantities),
        class_bars(ledger.rows(), quantities),
        spectrum_by_rank(ledger.spectra()),
        eigenvalue_histogram(ledger.spectra()),
        time_spent(ledger.rows()),
    ):
        assert figure is not None
        assert "NaN" not in json.dumps(json.loads(figure.to_json()))


def test_missing_plotly_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install jinja2 plotly pandas"):
        risk_over_epochs(rows())
