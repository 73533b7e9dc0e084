"""Reports in a real browser: every section, dark, on a phone, by keyboard, live."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from browser import PHONE, SCREEN, boxes, browsing, check, opened
from reporting.audits import attacked

from leakwatch.reporting import RiskLedger, Row, write_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytest.importorskip("plotly")

Make = Callable[..., RiskLedger]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as running:
        yield running


def audited(make_run: Make, epochs: tuple[int, ...] = (0, 5, 10)) -> Path:
    """A run with everything that a report can show."""
    ledger = make_run(epochs=epochs, samples=10)
    generator = np.random.default_rng(0)
    pictures = ledger.read_probes()
    assert pictures is not None
    samples = 100 + 7 * np.arange(10)
    for epoch in epochs:
        rows = []
        for kind, best in (("near", 34.0), ("random", 12.0)):
            psnr = best + generator.normal(0, 2, 10)
            good = (psnr > 11.0).tolist()
            rows += attacked(kind, psnr.tolist(), good, epoch=epoch)
        rows = [
            replace(r, step=40 * epoch, sample=int(samples[r.sample]))
            for r in rows
            if r.sample is not None
        ]
        for name, shift in (("constant", 8.0), ("mean", 11.0)):
            rows += [
                Row(epoch, 40 * epoch, int(s), i, f"audit/baseline/{name}_psnr", shift)
                for i, s in enumerate(samples)
            ]
        for layer, share in (("conv", 0.7), ("fc", 0.3)):
            rows += [
                Row(epoch, 40 * epoch, int(s), i, f"layers/{layer}", share)
                for i, s in enumerate(samples)
            ]
        said = "estimated: 95 % interval [+0.10, +0.95], n = 10"
        name = "audit/spearman/i2f_bayes_psnr/near/psnr"
        rows.append(Row(epoch, 40 * epoch, None, None, name, 0.8, said))
        for name in ("psnr", "loss", "surrogate_similarity", "surrogate_mismatch"):
            name = f"update/client-3/{name}"
            rows.append(Row(epoch, 40 * epoch, None, None, name, 0.1))
        noise = generator.integers(0, 256, pictures["pixels"].shape, np.uint8)
        ledger.append(
            rows,
            attacks={
                "sample": samples,
                "class": np.arange(10),
                "epoch": epoch,
                "step": 40 * epoch,
                "original": pictures["pixels"],
                "near": pictures["pixels"],
                "random": noise,
            },
        )
    metadata = ledger.read_metadata()
    # A blind guess reaches 11.7 dB, near the line of what can be recognised.
    metadata["config"] |= {"prior_std": 0.26, "data_range": 1.0}
    ledger.write_metadata(metadata)
    return write_report(ledger.directory)


@pytest.mark.parametrize("width", [SCREEN, PHONE])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_section_at_every_width_in_both_colours(
    browser: Browser, make_run: Make, width: int, dark: bool
) -> None:
    report = audited(make_run)
    assert report.stat().st_size < 1.2e6
    with opened(browser, report, width=width, dark=dark) as (page, problems):
        check(page, problems)
        shown = page.eval_on_selector_all("main section", "all => all.map(s => s.id)")
        assert shown == [
            "attacks",
            "training",
            "classes",
            "samples",
            "spectrum",
            "layers",
            "time",
            "glossary",
            "limits",
            "about",
        ]
        assert page.locator(".plot").count() == 9
        attacks = page.locator("#attacks").inner_text()
        for part in ("Which scores foresaw it", "Originals and", "mismatch"):
            assert part in attacks
        # Levels that are near each other have their names in the legend, which leaves
        # room for the data.
        names = [box["text"] for box in boxes(page, "#fig-risk .legendtext")]
        assert names[-3:] == [
            "clearly recognisable above 20 dB",
            "hardly recognisable below 12 dB",
            "blind guess: 11.7 dB",
        ]
        assert boxes(page, "#fig-risk .shapelayer text") == []
        area = page.locator("#fig-risk .nsewdrag").bounding_box()
        assert area is not None
        assert area["height"] > 205


def test_the_slider_shows_other_audits_by_keyboard(
    browser: Browser, make_run: Make
) -> None:
    with opened(browser, audited(make_run)) as (page, problems):
        assert page.locator("output").inner_text() == "after epoch 10"
        page.locator("#when").focus()
        page.keyboard.press("ArrowLeft")
        assert page.locator("output").inner_text() == "after epoch 5"
        assert page.locator("#when").get_attribute("aria-valuetext") == "after epoch 5"
        visible = page.eval_on_selector_all(
            ".pair",
            "all => all.filter(p => p.checkVisibility()).map(p => p.dataset.when)",
        )
        assert visible == ["1"] * 20
        page.keyboard.press("Home")
        assert page.locator("output").inner_text() == "before training"
        assert problems == []


def test_all_that_can_be_used_is_reached_by_tab(
    browser: Browser, make_run: Make
) -> None:
    with opened(browser, audited(make_run, (0, 5))) as (page, _):
        usable = (
            "a[href], select, input, summary, th button, .scroll[tabindex], .clamp, "
            "#pause"
        )
        expected = page.eval_on_selector_all(
            usable, "all => all.filter(e => e.checkVisibility()).length"
        )
        reached = 0
        for _ in range(expected):
            page.keyboard.press("Tab")
            reached += page.evaluate(
                "(usable) => document.activeElement.matches(usable)", usable
            )
        assert reached == expected
        page.locator("#samples th button").first.focus()
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        page.keyboard.press("Enter")
        first = page.locator("#samples tbody tr").first.inner_text()
        assert first.startswith("#163")
        page.keyboard.press("Enter")
        assert page.locator("#samples tbody tr").first.inner_text().startswith("#100")
        assert outline != ""


def test_the_menu_changes_the_figure(browser: Browser, make_run: Make) -> None:
    ledger = make_run()
    with opened(browser, write_report(ledger.directory)) as (page, problems):
        axis = page.locator("#fig-risk .ytitle")
        assert (axis.text_content() or "").startswith("i2f_bayes_psnr")
        page.locator("#fig-risk-select").focus()
        page.locator("#fig-risk-select").select_option("i2f")
        drawn = "document.querySelector('#fig-risk .ytitle').textContent"
        page.wait_for_function(f"{drawn}.startsWith('i2f [')")
        assert problems == []


def test_a_live_page_reads_itself_again_and_keeps_the_place(
    browser: Browser, make_run: Make
) -> None:
    ledger = make_run(epochs=(0, 5))
    report = write_report(ledger.directory, live=True)
    with opened(browser, report, clock=True) as (page, problems):
        assert "Training goes on" in page.locator(".live").inner_text()
        check(page, problems)
        page.locator("#fig-risk-select").select_option("i2f")
        page.locator("#samples th button").first.press("Enter")
        page.evaluate("document.getElementById('spectrum').scrollIntoView()")
        page.evaluate("scrollBy(0, 120)")
        before = page.evaluate(
            "document.getElementById('spectrum').getBoundingClientRect().top"
        )
        make_more = make_run(epochs=(0, 5, 10), name="more")
        newer = write_report(make_more.directory, live=True)
        os.replace(newer, report)
        with page.expect_navigation():
            page.clock.run_for(45_000)
        page.wait_for_selector("html[data-ready=yes]")
        assert "after epoch 10" in page.locator(".lead").first.inner_text()
        after = page.evaluate(
            "document.getElementById('spectrum').getBoundingClientRect().top"
        )
        assert after == pytest.approx(before, abs=2)
        assert page.locator("#fig-risk-select").input_value() == "i2f"
        sort = page.locator("#samples th").first.get_attribute("aria-sort")
        assert sort == "descending"
        # Paused, it stays as it is.
        page.locator("#pause").click()
        write_report(ledger.directory)
        page.clock.run_for(120_000)
        assert page.locator(".live").count() == 1
        page.locator("#pause").click()
        with page.expect_navigation():
            page.clock.run_for(45_000)
        page.wait_for_selector("html[data-ready=yes]")
        assert page.locator(".live").count() == 0
        assert problems == []


def test_a_shared_library_draws_the_same(browser: Browser, make_run: Make) -> None:
    report = write_report(make_run().directory, shared=True)
    assert report.stat().st_size < 3e5
    with opened(browser, report) as (page, problems):
        check(page, problems)
        assert page.locator(".plot").count() == 6


def test_a_hundred_long_class_names_fit_a_phone(
    browser: Browser, make_run: Make
) -> None:
    ledger = make_run(classes=100, samples=100, epochs=(0,), rank=None)
    metadata = ledger.read_metadata()
    metadata["class_names"] = ["x" * 80 + f"<b>{n}" for n in range(100)]
    metadata["config"]["path"] = "y" * 300
    ledger.write_metadata(metadata)
    report = write_report(ledger.directory)
    with opened(browser, report, width=PHONE) as (page, problems):
        check(page, problems)
        # Long tables end in themselves, and say that there is more.
        assert page.locator("#samples .scroll.long").count() == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"use strict";', '"use strict"; setTimeout(() => missing());'),
        ("<main>", '<main><div style="width:700px">x</div>'),
        ("<main>", '<main><img src="https://example.org/a.png">'),
        ("<main>", '<main><p style="color:#888;background:#999">pale</p>'),
        ("box.before(hint);", ""),
    ],
    ids=["script error", "overflow", "request", "pale", "no hint"],
)
def test_the_check_notices_damage(
    browser: Browser, make_run: Make, old: str, new: str
) -> None:
    report = write_report(make_run(epochs=(0,), rank=None).directory)
    source = report.read_text("utf-8")
    assert old in source
    report.write_text(source.replace(old, new, 1), "utf-8")
    with (
        opened(browser, report, width=PHONE) as (page, problems),
        pytest.raises(AssertionError),
    ):
        check(page, problems)


def test_long_statuses_take_three_lines_until_they_are_asked_for(
    browser: Browser, tmp_path: Path
) -> None:
    ledger = RiskLedger(tmp_path)
    why = "estimated: within 3 %, " + "from components of the prior, " * 20
    ledger.append([Row(0, 0, i, 0, "i2f_psnr", 20.0, why) for i in range(2)])
    write_report(tmp_path)
    with opened(browser, tmp_path / "report.html") as (page, _):
        rows = "() => [...document.querySelectorAll('.clamp')].map(e => e.offsetHeight)"
        before = page.evaluate(rows)
        assert max(before) <= 75
        page.locator(".clamp").first.click()
        after = page.evaluate(rows)
        assert after[0] > 2 * before[0]
        assert after[1] == before[1]
