from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leakwatch.reporting.headline import find_headline
from leakwatch.reporting.ledger import LedgerWarning, RiskLedger
from leakwatch.reporting.report import write_report
from leakwatch.reporting.rows import Row
from leakwatch.reporting.table import LedgerTable

pytest.importorskip("plotly")

Make = Callable[..., RiskLedger]


class Outline(HTMLParser):
    """Collects what a test asks about: tags, visible text, balanced nesting."""

    VOID = frozenset({"meta", "link", "img", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def read(path: Path) -> tuple[str, Outline]:
    source = path.read_text("utf-8")
    outline = Outline()
    outline.feed(source)
    outline.close()
    assert outline.open == []
    return source, outline


def words(outline: Outline) -> str:
    return re.sub(r"\s+", " ", " ".join(outline.text))


def test_a_full_run_has_every_section(make_run: Make) -> None:
    ledger = make_run()
    path = write_report(ledger.directory)
    assert path == ledger.directory / "report.html"
    _, outline = read(path)
    sections = [a["id"] for tag, a in outline.tags if tag == "section"]
    assert sections == [
        "training",
        "classes",
        "samples",
        "spectrum",
        "time",
        "glossary",
        "limits",
        "about",
    ]
    plots = [a["id"] for _, a in outline.tags if a.get("class") == "plot"]
    assert plots == [
        "fig-risk",
        "fig-class",
        "fig-spectrum",
        "fig-histogram",
        "fig-time",
    ]
    said = words(outline)
    assert "pictures of training data" in said
    assert "failed" in said
    assert "out of memory after two retries" in said
    assert "below the precision floor 2.1e-7" in said
    assert "7 of 120 values at the last probe are not known" in said
    assert "LAVP, Theorem 3" in said
    assert "config.noise_std 0.01" in said
    images = [a["src"] for tag, a in outline.tags if tag == "img"]
    assert len(images) == 21
    assert all(str(src).startswith("data:image/png;base64,") for src in images)


def test_the_headline_is_in_words(make_run: Make) -> None:
    ledger = make_run(epochs=(1,))
    headline = find_headline(LedgerTable.from_rows(ledger.rows()))
    assert headline is not None
    best = max(
        row.value
        for row in ledger.rows()
        if row.quantity == "i2f_bayes_psnr" and row.usable
    )
    assert headline.summary.worst == best
    _, outline = read(write_report(ledger.directory))
    said = words(outline)
    assert f"{best:.1f} dB: clearly recognisable" in said
    assert "rules of thumb" in said


def test_the_plain_prediction_stands_in_when_the_bayesian_failed() -> None:
    rows = [
        Row(0, 0, 1, 0, "i2f_bayes_psnr", 9.0, "failed: x"),
        Row(0, 0, 1, 0, "i2f_psnr", 12.0),
    ]
    headline = find_headline(LedgerTable.from_rows(rows))
    assert headline is not None
    assert (headline.quantity, headline.summary.worst) == ("i2f_psnr", 12.0)


def test_the_report_asks_for_nothing_from_outside(make_run: Make) -> None:
    source, outline = read(write_report(make_run().directory))
    for tag, attributes in outline.tags:
        for name in ("src", "href", "action", "data", "poster"):
            address = attributes.get(name)
            if address is not None:
                assert address.startswith(("data:", "#")), (tag, address)
    assert source.count("Content-Security-Policy") >= 1
    policy = next(
        str(a["content"])
        for tag, a in outline.tags
        if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    assert source.count("* plotly.js v") == 1


def test_names_from_data_are_escaped(make_run: Make) -> None:
    evil = '</script><img src=x onerror="alert(1)">'
    ledger = make_run(
        samples=4,
        classes=2,
        metadata={
            "run": evil,
            "class_names": [evil, "plain"],
            "created": evil,
            "config": {evil: evil},
            "quantities": {
                "i2f_psnr": {
                    "unit": evil,
                    "direction": "higher = more exposed",
                    "meaning": evil,
                    "source": evil,
                }
            },
        },
        status=lambda name, place: f"failed: {evil}" if place == 0 else None,
    )
    ledger.append(
        [
            Row(20, 800, 100, 0, evil, 1.0),
            Row(20, 800, None, None, "audit", 1.0, f"failed: {evil}"),
        ]
    )
    source, outline = read(write_report(ledger.directory))
    assert evil not in source
    assert "<img src=x" not in source
    assert html.escape(evil) in source
    assert not [a for _, a in outline.tags if "onerror" in a]


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": (0,)},
        {"epochs": ()},
        {"pictures": None},
        {"rank": None},
        {"rank": 1},
        {"classes": 1},
        {"classes": 100, "samples": 100},
        {"metadata": {}},
        {"metadata": {"quantities": [], "class_names": "abc", "created": 5}},
        {"pictures": 2},
        {"status": lambda name, place: "failed: everything broke"},
        {"status": lambda name, place: "failed"},
    ],
    ids=lambda options: ",".join(options),
)
def test_incomplete_runs_have_a_report(make_run: Make, options: dict[str, Any]) -> None:
    path = write_report(make_run(**options).directory)
    _, outline = read(path)
    assert "What these numbers do not say" in words(outline)


def test_a_run_without_probes_says_so(make_run: Make) -> None:
    source, outline = read(write_report(make_run(epochs=(), rank=None).directory))
    assert "Nothing has been recorded yet" in words(outline)
    assert "* plotly.js v" not in source


def test_a_failed_run_never_looks_safe(make_run: Make) -> None:
    ledger = make_run(status=lambda name, place: "failed: out of memory", pictures=None)
    _, outline = read(write_report(ledger.directory))
    said = words(outline)
    assert "the exposure is not known , which does not mean that it is low" in said
    assert "hardly recognisable below" not in said
    assert "120 of 120 values at the last probe are not known" in said
    cells = [a for tag, a in outline.tags if tag == "td" and a.get("class") == "num"]
    scores = [a for a in cells if "data-sort" in a]
    assert scores
    assert not [a for a in scores if a["data-sort"] == "0.0"]
    assert said.count("failed") >= 120


def test_nan_with_status_ok_is_not_a_number(make_run: Make) -> None:
    ledger = make_run(samples=2, classes=2)
    ledger.append([Row(20, 800, 100, 0, "i2f_psnr", float("nan"))])
    _, outline = read(write_report(ledger.directory))
    assert "not a number" in words(outline)


def test_samples_start_with_the_unknown_then_the_most_exposed(make_run: Make) -> None:
    source, _ = read(write_report(make_run(pictures=None).directory))
    body = source[source.index('<table class="sort">', source.index('id="samples"')) :]
    lines = re.findall(r"<tr><td class=\"who\".*?</tr>", body, re.S)
    first = [re.search(r'class="num[^"]*" data-sort="([^"]*)"', line) for line in lines]
    found = [match[1] for match in first if match]
    assert len(found) == 20
    assert found[0] == ""
    numbers = [float(value) for value in found[1:]]
    assert numbers == sorted(numbers, reverse=True)


def test_a_torn_part_is_reported(make_run: Make) -> None:
    ledger = make_run()
    part = ledger.directory / "ledger" / "part-000001.csv"
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.warns(LedgerWarning, match="cut short"):
        path = write_report(ledger.directory)
    _, outline = read(path)
    assert "Part of the record could not be read" in words(outline)


def test_an_older_report_is_replaced_atomically(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = make_run()
    path = write_report(ledger.directory)
    before = path.read_bytes()
    ledger.append([Row(30, 1200, 100, 0, "i2f_psnr", 11.0)])

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="disk full"):
            write_report(ledger.directory)
    assert path.read_bytes() == before
    assert write_report(ledger.directory).read_bytes() != before
    assert not list(ledger.directory.glob(".*.tmp"))


def test_odd_pictures_are_left_out(make_run: Make) -> None:
    ledger = make_run(pictures=None)
    ledger.write_probes(np.zeros((1, 2, 2, 5), np.uint8), [100], [0])
    _, outline = read(write_report(ledger.directory))
    assert not [tag for tag, _ in outline.tags if tag == "img"]


def test_no_run_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no leakwatch run in"):
        write_report(tmp_path)


def test_missing_plotly_says_how_to_install(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = make_run()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "leakwatch\[report\]"'):
        write_report(ledger.directory)


def test_reporting_itself_imports_no_heavy_package() -> None:
    # The package's own modules only: what leakwatch/__init__.py imports is its affair.
    code = (
        "import sys, types; package = types.ModuleType('leakwatch'); "
        "package.__path__ = [sys.argv[1]]; sys.modules['leakwatch'] = package; "
        "import leakwatch.reporting; "
        "heavy = {'torch', 'lightning', 'wandb', 'pandas', 'plotly'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    import leakwatch.reporting

    package = Path(str(leakwatch.reporting.__file__)).parent.parent
    result = subprocess.run(
        [sys.executable, "-c", code, str(package)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"
