"""Pages of studies in a real browser."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import PHONE, SCREEN, browsing, check, opened

from leakwatch.studies.trade_offs.report import trade_off_page
from studies.initializations.test_conclusions import comparison
from studies.trade_offs.test_table import cell, trade_off

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytest.importorskip("plotly")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as running:
        yield running


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = trade_off(
        cell("gaussian", [30.0, math.nan, 20.0], predicted=27.0),
        cell("gaussian", [15.0, math.nan, 12.0], budget=0.5, predicted=14.0),
        cell("pruning", [35.0, 25.0, 30.0], predicted=31.0),
    )
    (folder / "trade_off.html").write_text(trade_off_page(found), "utf-8")
    compared = comparison({"normal": 41.0, "he": 30.0, "xavier": 11.8}, {"normal": 0.1})
    return {
        "trade-off": folder / "trade_off.html",
        "initialisations": compared.save(folder / "initialisations"),
    }


@pytest.mark.parametrize("name", ["trade-off", "initialisations"])
@pytest.mark.parametrize(("width", "dark"), [(SCREEN, True), (PHONE, False)])
def test_pages_at_every_width_in_both_colours(
    browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    assert pages[name].stat().st_size < 1e6
    with opened(browser, pages[name], width=width, dark=dark) as (page, problems):
        check(page, problems)
        first = page.locator("main section").first.inner_text()
        assert first.index("dB") < 400  # its conclusion leads
        menu = page.locator("select").first
        options = menu.locator("option").all_inner_texts()
        menu.focus()
        menu.select_option(options[-1])
        title = page.locator(".ytitle").first
        assert (title.text_content() or "").startswith(options[-1])
        assert problems == []
