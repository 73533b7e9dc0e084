"""What sections show, without any HTML."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import pytest
from reporting.audits import FAILED, attacked, scored

import leakwatch.reporting.html as package
from leakwatch.reporting import LedgerTable, RiskLedger, Row
from leakwatch.reporting.html.attacks import make_attack_lead, make_attacks, unexplained
from leakwatch.reporting.html.correlations import make_correlations
from leakwatch.reporting.html.markup import Badge, Card, NumberCell
from leakwatch.reporting.html.notices import make_notices
from leakwatch.reporting.html.page import render_page
from leakwatch.reporting.html.samples import make_sample_table
from leakwatch.reporting.html.summary import make_cards, make_lead, make_strip
from leakwatch.reporting.html.tables import (
    make_about,
    make_classes,
    make_glossary,
    make_layers,
)
from leakwatch.reporting.run_facts import RunFacts
from leakwatch.reporting.statistics.achieved import KINDS, achieved
from leakwatch.reporting.statistics.headline import find_headline

pytest.importorskip("plotly")

FACTS = RunFacts.of(
    {
        "class_names": ["cat", "dog", "fox"],
        "quantities": {"i2f": {"unit": "px", "direction": "higher = less exposed"}},
        "config": {"noise_std": 0.1, "prior_std": 0.1, "data_range": 1.0},
    }
)


def table(*rows: Row) -> LedgerTable:
    return LedgerTable.from_rows(rows)


def predicted(*values: float, epoch: int = 1) -> list[Row]:
    return scored({"i2f_psnr": values}, epoch=epoch)


def test_the_lead_says_what_is_known() -> None:
    nothing = make_lead(table(), None, FACTS)
    assert not nothing.recorded
    run = table(*scored({"i2f": [1.0]}))
    assert make_lead(run, None, FACTS).when == ""
    run = table(*predicted(12.0, 18.0, 31.0))
    lead = make_lead(run, find_headline(run), FACTS)
    assert (lead.when, lead.unknown) == ("after epoch 1", "")
    assert lead.worst == ("31.0 dB: clearly recognisable", "high")
    assert lead.median == ("18.0 dB: partly recognisable", "middle")
    assert lead.assumed.startswith("Gaussian noise of standard deviation 0.1 on every")
    run = table(Row(1, 10, 0, 0, "i2f_psnr", math.nan, "failed: x"))
    lead = make_lead(run, find_headline(run), FACTS)
    assert lead.unknown == "no usable value: 1 failed"


def test_cards_compare_with_the_first_probe() -> None:
    run = table(*predicted(10.0, 20.0), *predicted(13.0, 26.0, epoch=2))
    cards = make_cards(run, find_headline(run), FACTS, {1: "address"})
    worst, median, over, peak = cards
    note = "predicted PSNR of sample #1, dog"
    assert worst == Card("Most exposed sample", "26.0 dB", note, "high", "address")
    assert median.note == "predicted PSNR; 4.5 dB more than at the first probe"
    assert (over.big, over.note) == ("1 of 2", "samples clearly recognisable")
    assert peak.note == "highest predicted PSNR of any sample, after epoch 2"
    seconds = Row(1, 10, None, None, "seconds", 2.0)
    share = Row(1, 10, None, None, "time_fraction", math.nan, "undefined: no training")
    (cost,) = make_cards(table(seconds, share), None, FACTS, {})
    assert (cost.big, cost.note) == (
        "2.00 s in 1 probe step",
        "share of training: no training",
    )


def test_the_strip_places_samples_between_its_ends() -> None:
    run = table(*predicted(5.0, 20.0, 35.0, 41.0))
    strip = make_strip(find_headline(run), FACTS)
    assert strip is not None
    assert strip.range == "5 to 45 dB"
    assert [dot.left for dot in strip.dots] == [0.0, 37.5, 75.0, 90.0]
    assert [mark.left for mark in strip.marks] == [17.5, 37.5]
    assert sum(zone.width for zone in strip.zones) == 100.0
    assert strip.dots[0].text == "#0, cat: 5.0 dB"
    assert strip.guess == (37.5, "20.0 dB")
    assert make_strip(None, FACTS) is None


def test_a_sample_s_unknown_values_are_badges_and_stay_on_top() -> None:
    run = table(
        *scored({"i2f_psnr": [30.0, 11.0]}),
        Row(1, 10, 2, 2, "i2f_psnr", math.nan, "failed: out of memory"),
        Row(1, 10, 0, 0, "i2f", 1.5, "estimated: residual 2e-4"),
    )
    content = make_sample_table(run, FACTS, {})
    assert content is not None
    assert "values that are not known stay on top" in content.words
    assert [row.name for row in content.rows] == ["fox", "cat", "dog"]
    assert [score.note for score in content.scores] == [
        "dB, high = exposed",
        "px, low = exposed",
    ]
    assert [score.descending for score in content.scores] == [True, False]
    fox, cat, dog = content.rows
    assert fox.cells[0] == NumberCell(
        badge=Badge("failed", "bad", "failed: out of memory"), sort=""
    )
    assert fox.trouble == Badge("2 not known", "bad", "1 failed, 1 not computed")
    assert cat.cells[1].text == "≈ 1.50"
    assert [reason.text for reason in cat.reasons] == ["i2f: residual 2e-4"]
    assert dog.cells[0] == NumberCell("11.0", None, "11.0", "11.0, ok", "low")


def test_notices_count_what_is_not_known() -> None:
    run = table(
        *scored({"i2f": [1.0]}),
        Row(1, 10, 1, 1, "i2f", math.nan, "failed: x"),
        Row(1, 10, 0, 0, "loss", math.nan, "not computed: not asked"),
        Row(1, 10, None, None, "audit", math.nan, "failed: y"),
    )
    notices = make_notices(run, [f"part {i}" for i in range(10)], private=False)
    assert (notices.unknown, notices.unknown_count, notices.values) == (
        "1 failed",
        1,
        3,
    )
    assert notices.unknown_names == "i2f"
    assert notices.trouble.shown == ("audit, after epoch 1: failed (y)",)
    assert (len(notices.problems.shown), notices.problems.more) == (8, 2)
    assert notices.not_computed == "loss (not asked)"


def test_notices_name_the_scores_that_are_not_known() -> None:
    # Score k has no number for k of the seven samples.
    run = table(
        *[
            Row(1, 10, i, i % 3, f"score{k}", 1.0, "failed: x" if i < k else "ok")
            for k in range(8)
            for i in range(7)
        ]
    )
    notices = make_notices(run, [], private=False)
    assert (notices.unknown, notices.unknown_count) == ("28 failed", 28)
    assert notices.unknown_names == "score7, score6, score5, score4, score3, and 2 more"


def test_classes_are_compared_by_their_means() -> None:
    run = table(*scored({"i2f": [1.0, 3.0, 2.0], "image_std": [1.0, 2.0, 3.0]}))
    content = make_classes(run, run, FACTS)
    assert content is not None
    assert content.means is not None
    assert [row.name for row in content.means.rows] == ["cat", "dog", "fox"]
    assert content.means.rows[1].samples == NumberCell("1 of 1", sort="1")
    (spread,) = content.spreads
    # A higher error is less exposed.
    assert (spread.quantity, spread.most, spread.least) == ("i2f", "cat", "dog")
    assert [value.text for value in spread.values] == ["2.00", "3.00", "0.222"]
    assert make_classes(table(), table(), FACTS) is None


def test_layers_have_their_share() -> None:
    run = table(*scored({"layers/net.0": [0.25, 0.75], "layers/net.2": [0.75, 0.25]}))
    content = make_layers(run)
    assert content is not None
    assert content.rows[0] == ("net.0", "50.0%", "50.0%", "25.0% to 75.0%")
    assert make_layers(table(*predicted(20.0))) is None


def test_the_glossary_has_one_entry_for_a_family() -> None:
    names = ["audit/spearman/i2f/near/psnr", "audit/spearman/i2f/random/psnr"]
    run = table(*(Row(1, 10, None, None, name, 0.5) for name in names))
    (entry,) = make_glossary(run, {})
    assert entry.name == "audit/spearman/<score>/<start>/<metric>"
    assert entry.meaning.startswith("Rank correlation of a score")


def test_metadata_is_flat_and_long_lists_are_cut() -> None:
    metadata = {"config": {"a": {"b": 1}, "none": None}, "many": list(range(50))}
    entries = dict(make_about(metadata, table()))
    assert entries["config.a.b"] == "1"
    assert entries["config.none"] == "none"
    assert entries["many"].endswith("38, 39, … (50 entries)")


def test_internals_and_repetitions_are_left_out_of_the_metadata() -> None:
    digest = "float32 (2, 4) sha256 0f0f"
    prior = {"class": "MeasuredPrior", "_samples": digest, "_size": 8, "mean": digest}
    scoring = {"noise_std": 0.1, "criterion": "mine", "prepare": None}
    metadata = {
        "config": {"noise_std": 0.1, "prior": None},
        "arguments": {"scoring": scoring, "settings": prior, "p": prior},
        "files": {"probes.npz": {"sha256": "0f0f"}},
        "checksum": "0f0f",
    }
    assert make_about(metadata, table()) == [
        ("probe_steps", "0"),
        ("config.noise_std", "0.1"),
        ("config.prior", "none"),
        ("arguments.scoring.criterion", "mine"),
        ("arguments.p.class", "MeasuredPrior"),
    ]


def test_only_conclusive_attacks_make_numbers() -> None:
    run = table(*predicted(28.0, 12.0), *attacked("random", [30, 9], [True, False]))
    content = make_attacks(run, [], FACTS)
    assert content is not None
    (card,) = content.cards
    assert (card.big, card.level) == ("30.0 dB", "high")
    (reason,) = content.inconclusive
    assert (reason.samples, reason.reason) == ("1 sample", FAILED.partition(": ")[2])
    assert content.gallery is None
    assert content.clients == ()
    attack = make_attack_lead(run)
    assert attack is not None
    assert attack.kinds == (
        ("practical", "30.0 dB median PSNR, 1 of 1 recovered, 1 more inconclusive"),
    )
    assert make_attacks(table(*predicted(20.0)), [], FACTS) is None


def test_the_mismatch_of_the_latest_round_counts() -> None:
    def of_client(client: int, epoch: int, value: float) -> Row:
        name = f"update/client-{client}/surrogate_mismatch"
        return Row(epoch, 10 * epoch, None, None, name, value)

    early = [of_client(0, 1, 0.9)]
    late = [of_client(0, 2, 0.1), of_client(1, 2, 0.15)]
    assert "mismatch 0.900" in unexplained(table(*early))
    assert unexplained(table(*early, *late)) == ""
    assert unexplained(table()) == ""


def test_kinds_without_a_correlation_have_a_sentence() -> None:
    rows = [*attacked("near", [30, 20] * 4, [True] * 8)]
    rows += attacked("random", [9, 8] * 4, [False] * 8)
    status = "estimated: [-0.20, +0.95], n = 14 of 20"
    name = "audit/spearman/i2f/near/psnr"
    rows.append(Row(1, 10, None, None, name, -0.8, status))
    run = table(*rows)
    kinds = {kind: achieved(run, run.moments[0], kind) for kind in KINDS}
    known = {kind: result for kind, result in kinds.items() if result is not None}
    content = make_correlations(run, run.moments[0], known, FACTS.quantities)
    assert content is not None
    assert content.columns == (("psnr", "worst case, 8 of 8 conclusive"),)
    (row,) = content.rows
    assert (row.score, row.direction) == ("i2f", "higher = less exposed")
    assert row.cells[0] == NumberCell(
        "−0.80",
        about="[-0.20, +0.95], n = 14 of 20",
        note="[−0.20, +0.95], n = 14",
    )
    (sentence,) = content.silent
    assert "no correlation, no attack on 8 samples was conclusive" in sentence
    assert (content.intervals, content.by_chance) == (1, 0)


def test_few_attacks_have_no_correlation() -> None:
    rows = attacked("near", [30, 20] * 4, [True] * 7 + [False])
    status = "estimated: [-0.20, +0.95], n = 7 of 8"
    name = "audit/spearman/i2f/near/psnr"
    rows.append(Row(1, 10, None, None, name, -0.8, status))
    run = table(*rows)
    result = achieved(run, run.moments[0], "near")
    assert result is not None
    content = make_correlations(run, run.moments[0], {"near": result}, {})
    assert content is not None
    assert content.columns == ()
    (sentence,) = content.silent
    assert "no correlation, 7 of 8 conclusive, and it takes 8" in sentence


def test_a_missing_value_is_an_error_and_text_is_escaped(tmp_path: Path) -> None:
    frame: Mapping[str, Any] = {"title": "<t>", "heading": "", "about": ""}
    (tmp_path / "a.html.j2").write_text("<p>{{ value }}</p>")
    page = render_page("a.html.j2", folder=tmp_path, value="<b>", **frame)
    assert "<p>&lt;b&gt;</p>" in page
    assert "<title>&lt;t&gt;</title>" in page
    with pytest.raises(jinja2.UndefinedError, match="'value' is undefined"):
        render_page("a.html.j2", folder=tmp_path, **frame)


def test_no_python_file_holds_html() -> None:
    for path in Path(package.__path__[0]).glob("*.py"):
        tags = re.findall(r"</?(?:div|span|td|tr|p|strong|ul|li)\b", path.read_text())
        assert not tags, path.name


def test_the_same_ledger_gives_the_same_page(
    make_run: Callable[..., RiskLedger],
) -> None:
    from leakwatch.reporting import write_report

    ledger = make_run(epochs=(0, 5))
    assert (
        write_report(ledger.directory).read_bytes()
        == write_report(ledger.directory).read_bytes()
    )
