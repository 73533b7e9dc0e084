"""A prediction that is a lower bound says so wherever it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from leakwatch.callbacks._recording.summary import sentence
from leakwatch.cli.main import main
from leakwatch.reporting import RiskLedger, Row, class_bars, risk_over_epochs
from leakwatch.reporting.html.report import write_report
from leakwatch.reporting.html.runs import write_comparison
from leakwatch.reporting.quantities import Quantity

pytest.importorskip("plotly")

LIMITED = "estimated: exposure is at least that and at most 31.5 dB: more may be seen"
OPEN = "estimated: exposure is at least that: more may be seen"
CLOSE = "estimated: within 3 %, from 64 of 784 components"


def rows(*statuses: str, of: float = 18.0) -> list[Row]:
    found = [
        Row(1, 9, i, i % 2, "i2f_psnr", of + i, status)
        for i, status in enumerate(statuses)
    ]
    return [*found, Row(1, 9, None, None, "seconds", 1.0)]


def run(folder: Path, *statuses: str, of: float = 18.0) -> Path:
    ledger = RiskLedger(folder)
    ledger.append(rows(*statuses, of=of))
    ledger.write_metadata({"probes_fingerprint": "f", "model": "Net"})
    return folder


def test_the_console_says_it_of_median_and_worst() -> None:
    described = {"i2f_psnr": Quantity("i2f_psnr", "dB", "higher = more exposed")}
    line = sentence(rows(LIMITED, "ok"), described, None, "data")
    assert "at least 18.5 dB median, at least 19.0 dB for the worst" in line
    assert "at least" not in sentence(rows(CLOSE, "ok"), described, None, "data")


def test_the_console_marks_estimates() -> None:
    described = {"i2f_psnr": Quantity("i2f_psnr", "dB", "higher = more exposed")}
    line = sentence(rows("ok", CLOSE, CLOSE), described, None, "data")
    assert ": ≈ 19.0 dB median, ≈ 20.0 dB for the worst" in line
    line = sentence(rows("ok", CLOSE, CLOSE, "ok"), described, None, "data")
    assert ": 19.5 dB median, 21.0 dB for the worst" in line
    line = sentence(rows("ok", "ok", CLOSE), described, None, "data")
    assert ": 19.0 dB median, ≈ 20.0 dB for the worst" in line


def test_report_and_commands_mark_estimates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = run(tmp_path / "some", "ok", CLOSE, CLOSE)
    RiskLedger.open(some).append(rows("ok", "ok", CLOSE, of=24.0))
    page = write_report(run(tmp_path / "all", "ok", CLOSE, CLOSE)).read_text("utf-8")
    lead, rest = page.split('<p class="lead">')[1].split("</p>", 1)
    assert "≈ 20.0 dB: partly recognisable" in lead
    assert "≈ 19.0 dB: partly recognisable" in lead
    for text in (">≈ 20.0 dB</div>", ">≈ 19.0 dB</div>", ">≈ 19.0</td>"):
        assert text in rest
    assert "Sample #2 (class 0): ≈ 20.0 dB" in rest
    page = write_report(some).read_text("utf-8")
    lead = page.split('<p class="lead">')[1].split("</p>", 1)[0]
    assert "≈ 26.0 dB: clearly recognisable" in lead
    assert ">25.0 dB: clearly" in lead
    assert "≈ 25.0" not in page
    assert main(["show", str(tmp_path / "all")]) == 0
    shown = capsys.readouterr().out
    assert shown.count("≈ 20.0") == 2
    assert "≈ 19.0" in shown
    assert main(["compare", str(tmp_path / "all"), str(some)]) == 0
    assert "≈ 20.0 dB" in capsys.readouterr().out
    compared = write_comparison([some, tmp_path / "all"], tmp_path / "runs.html")
    assert "≈ 26.0 dB predicted" in compared.read_text("utf-8")


def test_the_report_says_it_everywhere(tmp_path: Path) -> None:
    run(tmp_path, LIMITED, OPEN, "ok", CLOSE)
    ledger = RiskLedger.open(tmp_path)
    steep = "estimated: at least this, and probably within 12 %"
    ledger.append(
        [
            Row(1, 9, 0, 0, "i2f_bayes", 0.2, LIMITED),
            Row(1, 9, 0, 0, "lavp_l2_max", 7.0, steep),
        ]
    )
    low = {"direction": "higher = less exposed"}
    ledger.write_metadata({"quantities": {"i2f_bayes": low, "lavp_l2_max": low}})
    page = write_report(tmp_path).read_text("utf-8")
    lead, rest = page.split('<p class="lead">')[1].split("</p>", 1)
    assert lead.count("at least") == 2
    assert "at least 21.0 dB: clearly recognisable" in lead
    assert "at least 19.5 dB: partly recognisable or more" in lead
    assert ">at least 21.0 dB</div>" in rest  # a card
    assert ">≥ 18.0</td>" in rest
    assert ">20.0</td>" in rest
    assert ">≈ 21.0</td>" in rest
    assert ">≤ 0.200</td>" in rest  # a low error is what is exposed
    assert ">≈ 7.00</td>" in rest  # at least that, but no bound of the exposure
    assert "2 of 4 dots are bounds" in rest
    assert (
        "2 of 4 predictions are lower bounds: exposure is at least that, and may be up "
        "to 31.5 dB; of 1 it is not known up to what. precision=&#39;exact&#39;" in rest
    )
    assert "At least 1 of 4 samples with a number." in rest
    assert "is worst off:" not in rest
    assert "bounds can&#39;t be ranked" in rest


def test_a_report_without_bounds_names_the_worst_class(tmp_path: Path) -> None:
    page = write_report(run(tmp_path, "ok", "ok", CLOSE)).read_text("utf-8")
    assert "is worst off:" in page
    assert "at least" not in page.split('<p class="lead">')[1].split("</p>")[0]
    assert "lower bounds" not in page


def test_low_bounds_show_no_safety(tmp_path: Path) -> None:
    page = write_report(run(tmp_path, OPEN, OPEN, of=5.0)).read_text("utf-8")
    assert "is predicted above 12 dB" not in page
    assert "bounds show no safety" in page


def test_figures_draw_carets() -> None:
    risk = risk_over_epochs(rows(LIMITED, "ok"))
    symbols = {trace.name: trace.marker.symbol for trace in risk.data}
    assert symbols["median"] == ("triangle-up",)
    assert {"circle", ("triangle-up",)} == set(symbols.values()) - {None}
    assert "a caret is a bound" in risk.layout.title.subtitle.text
    bars = class_bars(rows(LIMITED, "ok"))
    assert bars.data[1].marker.symbol == ("triangle-right", "circle")
    assert "the order may be another" in bars.layout.title.subtitle.text
    assert "caret" not in risk_over_epochs(rows("ok", CLOSE)).layout.title.subtitle.text


def test_bounds_of_runs_are_not_ranked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run(tmp_path / "a", OPEN, "ok"), run(tmp_path / "b", "ok", "ok", of=9.0)]
    page = write_comparison(runs, tmp_path / "runs.html").read_text("utf-8")
    assert "exposes most:" not in page
    assert "Which exposes most is not known (a): bounds can" in page
    assert ">≥ 19.0 dB</td>" in page
    assert ">10.0 dB</td>" in page
    assert main(["compare", *map(str, runs)]) == 0
    printed = capsys.readouterr().out
    assert "≥ 19.0 dB" in printed
    assert "bounds can't be ranked" in printed
    assert main(["show", str(runs[0])]) == 0
    printed = capsys.readouterr().out
    assert "≥ 18.5  ≥ 19.0" in printed
    assert "1 of 2 are lower bounds" in printed
