"""Several runs on one page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import PHONE, SCREEN, browsing, check, opened

from leakwatch.reporting import RiskLedger, Row, write_comparison, write_report
from leakwatch.reporting.statistics.runs import audits_beside, incomparable, read_runs

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytest.importorskip("plotly")

Make = Callable[..., RiskLedger]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as running:
        yield running


def run(folder: Path, *values: float, noise: float = 0.1) -> Path:
    ledger = RiskLedger(folder)
    ledger.append([Row(0, 0, i, i % 2, "i2f_psnr", v) for i, v in enumerate(values)])
    ledger.write_metadata(
        {"config": {"noise_std": noise}, "probes_fingerprint": "f", "model": "Net"}
    )
    return folder


def test_the_most_exposed_is_first_and_named(tmp_path: Path) -> None:
    low, high = run(tmp_path / "low", 11.0, 12.0), run(tmp_path / "high", 30.0, 13.0)
    write_report(high)
    page = write_comparison([low, high], tmp_path / "runs.html").read_text("utf-8")
    assert "high exposes most: 30.0 dB predicted for its most exposed sample" in page
    assert "low exposes least: 12.0 dB" in page
    assert '<a href="high/report.html">high</a>' in page
    assert "<a" not in page.split(">low<")[0].rsplit("<td", 1)[1]
    assert "Read with care" not in page
    table = page.split('aria-label="Samples"')[1].split("</table>")[0]
    assert table.index("#0") < table.index("#1")  # 30 dB in one of them


def test_probes_at_other_epochs_are_told(tmp_path: Path) -> None:
    paths = [run(tmp_path / "a", 20.0), run(tmp_path / "b", 21.0)]
    assert incomparable(read_runs(paths)) == []
    RiskLedger.open(paths[1]).append([Row(4, 9, 0, 0, "i2f_psnr", 22.0)])
    assert incomparable(read_runs(paths)) == ["epoch"]


def test_what_differs_is_said(tmp_path: Path) -> None:
    paths = [run(tmp_path / "a", 20.0), run(tmp_path / "b", 21.0, noise=0.01)]
    assert incomparable(read_runs(paths)) == ["noise_std"]
    page = write_comparison(paths, tmp_path / "runs.html").read_text("utf-8")
    assert "These runs differ in noise_std" in page
    settings = page.split('<section id="settings">')[1]
    assert "config.noise_std" in settings
    assert "model" not in settings.split("</table>")[0]


def test_unknown_is_on_top_and_not_safe(tmp_path: Path) -> None:
    empty = RiskLedger(tmp_path / "empty")
    empty.append([Row(0, 0, 0, 0, "loss", 1.0)])
    paths = [run(tmp_path / "a", 20.0), tmp_path / "empty"]
    assert [found.label for found in read_runs(paths)] == ["empty", "a"]
    page = write_comparison(paths, tmp_path / "runs.html").read_text("utf-8")
    assert "Not known, which is not safe: empty." in page


def test_one_run_is_no_comparison(tmp_path: Path) -> None:
    only = run(tmp_path / "a", 20.0)
    with pytest.raises(ValueError, match="two runs or more, got 1"):
        write_comparison([only, only], tmp_path / "runs.html")


@pytest.mark.parametrize(("width", "dark"), [(SCREEN, True), (PHONE, False)])
def test_the_page_in_a_browser(
    browser: Browser, make_run: Make, tmp_path: Path, width: int, dark: bool
) -> None:
    paths = [make_run(name=name, epochs=(0, 5)).directory for name in ("one", "two")]
    page = write_comparison(paths, tmp_path / "runs.html")
    assert page.stat().st_size < 1e6
    with opened(browser, page, width=width, dark=dark) as (shown, problems):
        check(shown, problems)
        assert shown.locator(".plot").count() == 3


def test_attacks_of_the_same_network_beside_a_record_are_named(tmp_path: Path) -> None:
    network = {"model": "Net", "model_name": "LeNet", "parameters": 9}
    attacks = {"quantities": {"audit/near/psnr": {}}}
    for folder, metadata in {
        "watched": {},
        "audit": attacks,
        "other-network": attacks | {"parameters": 8},
        "other-monitor": {"quantities": {"i2f_psnr": {}}},
        "damaged": {"quantities": 3},
    }.items():
        ledger = RiskLedger(run(tmp_path / folder, 20.0))
        ledger.write_metadata(network | metadata)
    watched = RiskLedger.open(tmp_path / "watched")
    assert audits_beside(watched) == ["audit"]
    page = write_report(watched.directory).read_text("utf-8")
    assert (
        "Nothing in this record has tested it: it holds no attack. Attacks on the same "
        "network are recorded in audit." in page
    )
    assert audits_beside(RiskLedger.open(run(tmp_path / "unknown", 20.0))) == []
