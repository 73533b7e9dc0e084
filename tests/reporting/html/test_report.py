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

from leakwatch.reporting import (
    LedgerTable,
    LedgerWarning,
    RiskLedger,
    Row,
    write_report,
)
from leakwatch.reporting.statistics.headline import find_headline

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
        "fig-class-epochs",
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
    assert "Some probes report trouble" not in said
    assert "Not computed:" not in said
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
    assumed = "Gaussian noise of standard deviation 0.01 on every entry of the shared"
    assert f"(after epoch 1), assuming {assumed} gradient, an attacker" in said
    assert "predictions assume noise of std 0.01" in said
    assert "undefended" not in said


@pytest.mark.parametrize(
    ("noise", "sentence"),
    [
        (1e-4, "0.0001 on every entry of the shared gradient (close to an undefended"),
        (1e-3, "0.001 on every entry of the shared gradient (close to an undefended"),
        (2e-3, "0.002 on every entry of the shared gradient, an attacker"),
        (None, "(after epoch 1), an attacker"),
        ("0.1", "(after epoch 1), an attacker"),
        (True, "(after epoch 1), an attacker"),
        (float("nan"), "(after epoch 1), an attacker"),
    ],
)
def test_the_headline_states_the_assumed_noise(
    make_run: Make, noise: object, sentence: str
) -> None:
    ledger = make_run(epochs=(1,), rank=None, metadata={"config": {"noise_std": noise}})
    _, outline = read(write_report(ledger.directory))
    said = words(outline)
    assert sentence in said
    assert ("predictions assume noise" in said) == ("shared gradient" in sentence)


@pytest.mark.parametrize(
    ("metadata", "title", "subtitle"),
    [
        ({"model_name": "LeNet", "model": "Lit"}, "LeNet", "run lenet on digits · 20"),
        ({"model": "Lit"}, "Lit", "run lenet on digits · 20"),
        ({"model": ["Lit"]}, "lenet on digits", "20 watched samples"),
    ],
)
def test_the_title_names_the_model(
    make_run: Make, metadata: dict[str, Any], title: str, subtitle: str
) -> None:
    ledger = make_run(epochs=(0,), rank=None, metadata=metadata)
    source, _ = read(write_report(ledger.directory))
    assert f"<h1>Gradient leakage of {title}</h1>" in source
    assert f'<div class="soft">{subtitle}' in source


def test_notes_are_notices_and_the_solver_leads_the_run_s_table(
    make_run: Make,
) -> None:
    notes = [f"caveat {place} of <b>" for place in range(12)]
    ledger = make_run(
        epochs=(0,),
        rank=None,
        metadata={"config": {"solver": "auto"}, "notes": notes, "solver_used": "power"},
    )
    source, outline = read(write_report(ledger.directory))
    for note in notes:
        assert source.count(f"<li>{html.escape(note)}</li>") == 1
    assert "solver_used power" in words(outline)
    assert words(outline).index("solver_used") < words(outline).index("config.solver")


def undefined_time(ledger: RiskLedger, status: str) -> None:
    nan = float("nan")
    ledger.append([Row(0, 0, None, None, "time_fraction", nan, status)])


def test_no_share_of_training_before_training_is_no_trouble(make_run: Make) -> None:
    ledger = make_run(epochs=(0,), rank=None)
    undefined_time(ledger, "undefined: no training yet")
    source, outline = read(write_report(ledger.directory))
    said = words(outline)
    assert "Some probes report trouble" not in said
    assert (
        "Cost of watching 2.10 s in 1 probe step share of training: no training" in said
    )
    data = source[source.index('id="fig-time-data"') :]
    assert '"customdata":["no training yet"]' in data[: data.index("</script>")]


def test_trouble_at_a_probe_is_said(make_run: Make) -> None:
    ledger = make_run(epochs=(0,), rank=None)
    undefined_time(ledger, "failed: clock stopped")
    _, outline = read(write_report(ledger.directory))
    said = words(outline)
    assert "Some probes report trouble. time_fraction, before training: failed" in said
    assert "share of training not recorded" in said


def test_not_computed_is_one_calm_sentence_by_reason(make_run: Make) -> None:
    def status(name: str, place: int) -> str | None:
        if name in ("i2f", "i2f_psnr"):
            return "not computed: lanczos gives no <inverse>"
        if name == "lavp_l2_min" and place < 3:
            return "not computed: not asked"
        return "estimated: residual 2e-4" if name == "lavp_l2_max" else None

    ledger = make_run(epochs=(0, 5), rank=None, status=status)
    ledger.append(
        [Row(5, 200, None, None, "audit", float("nan"), "not computed: not asked")]
    )
    source, _ = read(write_report(ledger.directory))
    calm = re.findall(r'<div class="notice calm">(.*?)</div>', source, re.S)
    assert [" ".join(text.split()) for text in calm] == [
        "<strong>Not computed:</strong> i2f_psnr, i2f "
        "(lanczos gives no &lt;inverse&gt;); lavp_l2_min for 3 of 20 samples, audit "
        "(not asked). This says nothing about exposure."
    ]
    assert '<span class="bad"' not in source[source.index('id="samples"') :]
    assert "values at the last probe are not known" not in source
    assert "Some probes report trouble" not in source


def test_reasons_not_to_compute_are_counted_when_there_are_many(
    make_run: Make,
) -> None:
    ledger = make_run(
        samples=6, rank=None, status=lambda name, place: f"not computed: why {place}"
    )
    _, outline = read(write_report(ledger.directory))
    said = words(outline)
    assert "(why 3); and more, for 2 other reasons. This says nothing" in said
    assert "the exposure is not known , which does not mean that it is low" in said


def test_a_sample_s_trouble_is_said_next_to_its_class(make_run: Make) -> None:
    def status(name: str, place: int) -> str | None:
        if place == 0 and name in ("i2f", "i2f_psnr"):
            return "failed: a" if name == "i2f" else "unresolved: b"
        if place == 1 and name == "loss":
            return "failed: a"
        if place == 2 and name == "loss":
            return "not computed: c"
        return "estimated: d" if place == 3 else None

    ledger = make_run(epochs=(0,), samples=5, rank=None, pictures=None, status=status)
    source, _ = read(write_report(ledger.directory))
    table = source[source.index('id="samples"') :]
    found = dict(
        re.findall(r'<td class="name" data-sort="class (\d)">class \d(.*?)</td>', table)
    )
    assert found == {
        "0": '<div><span class="bad" title="1 unresolved, 1 failed">2 not known</span>'
        "</div>",
        "1": '<div><span class="bad" title="1 failed">1 failed</span></div>',
        "2": '<div><span class="about" title="1 not computed">1 not computed</span>'
        "</div>",
        "3": "",
        "4": "",
    }


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
    assert source.count('id="library"') == 1
    assert len(source.encode()) < 2e6


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
            "model_name": evil,
            "notes": [evil],
            "solver_used": evil,
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
    assert evil in words(outline)
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
    assert 'id="library"' not in source


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
    lines = re.findall(r"<tr>\s*<td class=\"who\".*?</tr>", body, re.S)
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
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install jinja2 plotly pandas"):
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
