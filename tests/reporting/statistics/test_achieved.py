"""Inconclusive attacks count nowhere, and are said to be inconclusive everywhere."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from reporting.audits import FAILED, attacked, scored

from leakwatch.reporting import LedgerTable, Moment, RiskLedger, Row, write_report
from leakwatch.reporting.figures.attacks import achieved_over_epochs, predicted_achieved
from leakwatch.reporting.statistics.achieved import achieved, conclusive_values

NOW = Moment(1, 10)
#: Numbers that are nowhere else on a page.
LOST = 7.7
SCORES = {"i2f_bayes_psnr": [20.0, 22.0, 24.0, 26.0], "image_std": [0.4, 0.3, 0.2, 0.1]}


def table(*parts: list[Row]) -> LedgerTable:
    return LedgerTable.from_rows([row for part in parts for row in part])


def report(folder: Path, *parts: list[Row], **metadata: Any) -> str:
    ledger = RiskLedger(folder)
    ledger.write_metadata(metadata)
    for part in parts:
        ledger.append(part)
    return write_report(folder).read_text("utf-8")


def visible(page: str) -> str:
    """What a reader sees without pointing at anything, figures left out."""
    body = page.split("<main>", 1)[1].split("</main>", 1)[0]
    body = re.sub(r"<script.*?</script>", " ", body, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", body).split())


def test_only_conclusive_attacks_give_numbers() -> None:
    rows = attacked("near", [30, 20, LOST, 10], [True, True, False, True])
    found = achieved(table(rows), NOW, "near")
    assert found is not None
    assert (found.attacked, found.conclusive, found.inconclusive) == (4, 3, 1)
    assert (found.recovered, found.partly, found.median) == (1, 1, 20.0)
    column = conclusive_values(table(rows), NOW, "near", "psnr")
    assert column is not None
    assert column.values[[0, 1, 3]].tolist() == [30, 20, 10]
    assert math.isnan(column.values[2])
    assert achieved(table(rows), NOW, "random") is None
    assert conclusive_values(table(rows), NOW, "near", "ssim") is None


def test_a_verdict_decides_even_if_the_quality_says_ok() -> None:
    rows = attacked("near", [30, 20], [True, False])
    rows = [
        Row(r.epoch, r.step, r.sample, r.label, r.quantity, r.value, "ok")
        if r.quantity.endswith("psnr")
        else r
        for r in rows
    ]
    found = achieved(table(rows), NOW, "near")
    assert found is not None
    assert found.median == 30.0


def test_none_conclusive_is_not_known(tmp_path: Path) -> None:
    rows = attacked("random", [LOST] * 4, [False] * 4) + scored(SCORES)
    found = achieved(table(rows), NOW, "random")
    assert found is not None
    assert math.isnan(found.median)
    said = visible(report(tmp_path, rows))
    assert "practical: no attack on 4 samples was conclusive" in said
    card = "practical (starts at noise) not known no attack on 4 samples was conclusive"
    assert card in said
    assert str(LOST) not in said


def test_cards_say_how_many_they_are_of(tmp_path: Path) -> None:
    rows = attacked("near", [30, 20, LOST, 10], [True, True, False, True])
    said = visible(report(tmp_path, rows + scored(SCORES)))
    assert "20.0 dB median PSNR of 3 samples, 1 more inconclusive" in said
    assert "1 recovered, 1 partly, 1 not" in said
    assert "worst case: 20.0 dB median PSNR, 1 of 3 recovered" in said
    assert str(LOST) not in said


def test_reasons_that_differ_in_numbers_are_one(tmp_path: Path) -> None:
    said = ["33 % not matched", "30.5 % not matched", "4 % not matched", "no memory"]
    rows = [
        row
        for i, reason in enumerate(said)
        for row in attacked("near", [LOST], [False], status=f"failed: {reason}")
        for row in [Row(row.epoch, row.step, i, 0, row.quantity, row.value, row.status)]
    ]
    words = visible(report(tmp_path, rows))
    assert "3 samples: 4 to 33 % not matched" in words
    assert "1 sample: no memory" in words


def test_all_reasons_are_named_or_counted(tmp_path: Path) -> None:
    rows = [
        row
        for i, letter in enumerate("abcdef")
        for row in attacked("near", [LOST], [False], status=f"failed: reason {letter}")
        for row in [Row(row.epoch, row.step, i, 0, row.quantity, row.value, row.status)]
    ]
    said = visible(report(tmp_path, rows))
    assert sum(f"reason {letter}" in said for letter in "abcdef") == 4
    assert "2 samples more: for other reasons" in said


def test_course_has_gaps_and_counts() -> None:
    first = attacked("near", [30, LOST], [True, False])
    second = attacked("near", [LOST, LOST], [False, False], epoch=2)
    # The third sample is watched, but never attacked.
    scores = [
        row for e in (1, 2) for row in scored({"i2f_bayes_psnr": [20, 22, 90]}, epoch=e)
    ]
    figure = achieved_over_epochs(table(first, second, scores))
    assert figure is not None
    lines = {trace.name: trace for trace in figure.data}
    assert list(lines["worst-case attack"].y) == [30.0, None]
    assert list(lines["worst-case attack"].customdata) == [
        "1 of 2 samples",
        "0 of 2 samples",
    ]
    assert list(lines["predicted (i2f_bayes_psnr)"].y) == [21.0, 21.0]
    assert list(figure.layout.xaxis.tickvals) == [1, 2]


def test_prediction_is_compared_with_conclusive_attacks() -> None:
    rows = attacked("random", [21, LOST, 23, LOST], [True, False, True, False])
    scores = scored({"i2f_bayes_psnr": [20.0, 22.0, 24.0]})
    scores.append(Row(1, 10, 3, 3, "i2f_bayes_psnr", 99.0, "failed: no memory"))
    figure = predicted_achieved(table(rows, scores), NOW, None)
    assert figure is not None
    shown = {trace.name: trace for trace in figure.data if trace.visible is True}
    assert list(shown) == ["practical attack"]
    assert list(shown["practical attack"].x) == [20.0, 24.0]
    hidden = next(t for t in figure.data if t.visible == "legendonly")
    assert hidden.name == "practical attack, 1 inconclusive"
    diagonal = figure.data[-1]
    assert list(diagonal.x) == list(diagonal.y) == [10.0, 40.0]
    lost = attacked("random", [LOST] * 4, [False] * 4)
    assert predicted_achieved(table(lost, scores), NOW, None) is None


def test_pictures_of_failed_attacks_come_last_and_are_no_evidence(
    tmp_path: Path,
) -> None:
    import numpy as np

    values = [10.0, 60.0, 20.0]
    rows = attacked("random", values, [True, False, True])
    ledger = RiskLedger(tmp_path)
    pixels = np.zeros((3, 4, 4, 1), np.uint8)
    kept = {
        "sample": np.arange(3),
        "class": np.arange(3),
        "epoch": 1,
        "step": 10,
        "original": pixels,
        "random": pixels,
    }
    ledger.append(rows, attacks=kept)
    page = write_report(tmp_path).read_text("utf-8")
    order = re.findall(r'aria-label="sample (\d)"', page)
    assert order == ["2", "0", "1"]
    assert '<div class="soft">60.0 dB</div>' in page
    assert page.count(">inconclusive</span>") == 1


@pytest.mark.parametrize("predicted", [True, False])
def test_figures_open_on_what_a_reader_came_for(
    tmp_path: Path, predicted: bool
) -> None:
    rows = scored({"image_std": SCORES["image_std"], "loss": [1, 2, 3, 4]})
    rows += attacked("near", [30, 20, LOST, 10], [True, True, False, True])
    if predicted:
        rows += scored({"i2f_psnr": [20, 21, 22, 23]})
    page = report(tmp_path, rows)
    first = "i2f_psnr" if predicted else "audit/near/psnr"
    for anchor in ("fig-risk", "fig-class"):
        data = re.search(rf'id="{anchor}-data">(.*?)</script>', page, re.DOTALL)
        assert data is not None
        labels = [button["label"] for button in json.loads(data[1])["buttons"]]
        assert labels[0] == first
        assert labels[-1] == "image_std"
        assert "audit/near/psnr" in labels
    if predicted:
        return
    # Of the class whose attack failed nothing is drawn.
    data = re.search(r'id="fig-class-data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert str(LOST) not in data[1]


def test_the_glossary_has_one_entry_for_all_correlations(tmp_path: Path) -> None:
    rows = attacked("near", [30, 20], [True, True])
    names = [f"audit/spearman/{s}/near/psnr" for s in ("loss", "i2f")]
    names += ["audit/near/recovered", "update/client-3/psnr", "update/client-4/psnr"]
    rows += [Row(1, 10, None, None, name, 0.5) for name in names]
    page = report(tmp_path, rows)
    glossary = page.split('id="glossary"', 1)[1].split("</section>", 1)[0]
    entries = re.findall(r'<td class="mono">([^<]*)</td>', glossary)
    assert entries.count("audit/spearman/&lt;score&gt;/&lt;start&gt;/&lt;metric&gt;")
    assert entries.count("update/client-&lt;number&gt;/psnr") == 1
    assert not any("loss" in entry for entry in entries)
    line = glossary.split("audit/&lt;start&gt;/recovered", 1)[1].split("</tr>", 1)[0]
    assert "conclusive" in line
    assert FAILED not in glossary
