"""Pages in a real browser: what goes wrong, what is drawn, what a reader can reach."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PHONE, SCREEN = 390, 1280

# ms; a busy machine without a GPU takes half a minute to draw a page.
_PATIENCE = 120_000

_OVERFLOW = """() => [...document.querySelectorAll("main > *, .panel, .card, .live")]
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
  .map((one) => one.className || one.tagName)"""

# Boxes that cut their content, and have no visible hint before them.
_CUT = """() => [...document.querySelectorAll(".scroll, .tall")].filter((box) => {
  const cut = box.scrollWidth > box.clientWidth + 1
    || box.scrollHeight > box.clientHeight + 1;
  const hint = box.previousElementSibling;
  const said = hint && !hint.hidden && hint.textContent.includes("Scroll");
  return cut && box.checkVisibility() && !said;
}).map((box) => box.getAttribute("aria-label") || box.className)"""

# Text that stands out too little from what is behind it: WCAG 2, AA.
_PALE = """() => {
  const parse = (colour) => {
    const [r, g, b, a] = colour.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a ?? 1];
  };
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => v / 255).map(
      (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (one) => {
    const layers = [];
    for (let e = one; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      layers.push(colour);
      if (colour[3] === 1) { break; }
    }
    return layers.reduceRight((under, over) => {
      const a = over[3];
      return [0, 1, 2].map((i) => over[i] * a + under[i] * (1 - a));
    }, [255, 255, 255]);
  };
  const texts = [...document.querySelectorAll("body *")].filter((one) =>
    !one.closest("script, style, svg, noscript") && one.checkVisibility()
    && [...one.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()));
  const pale = texts.filter((one) => {
    const style = getComputedStyle(one);
    const [over, under] = [luminance(parse(style.color)), luminance(behind(one))];
    const ratio = (Math.max(over, under) + 0.05) / (Math.min(over, under) + 0.05);
    const large = parseFloat(style.fontSize) >= 24;
    return ratio < (large ? 3 : 4.5);
  });
  return [...new Set(pale.map((one) => one.textContent.trim().slice(0, 40)))];
}"""

# Words of a figure that lie over each other, or over its data.
_COLLIDING = """() => [...document.querySelectorAll(".plot")].flatMap((plot) => {
  const over = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
    && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  const area = plot.querySelector(".nsewdrag")?.getBoundingClientRect();
  const words = [...plot.querySelectorAll("svg text")]
    .filter((one) => one.textContent.trim() && one.checkVisibility())
    .map((one) => ({ text: one.textContent, box: one.getBoundingClientRect(),
                     note: one.closest(".annotation"),
                     transform: one.getAttribute("transform") ?? "" }));
  // The box of slanted words is much larger than they are.
  const slanted = (one) => /rotate\\((?!0|-?90)/.test(one.transform);
  const found = words.flatMap((a, i) => words.slice(i + 1)
    .filter((b) => over(a.box, b.box) && !(slanted(a) && slanted(b)))
    .map((b) => `${a.text} / ${b.text}`));
  const inside = words.filter((one) => area && !one.note && over(one.box, area));
  return [...found, ...inside.map((one) => `${one.text} / data`)]
    .map((one) => `${plot.id}: ${one}`);
})"""

# Figures whose words have left next to no room for their data.
_SQUEEZED = """() => [...document.querySelectorAll(".plot")].filter((plot) =>
  plot.querySelector(".nsewdrag")?.getBoundingClientRect().height < 70)
  .map((plot) => plot.id)"""


@contextmanager
def browsing() -> Iterator[Browser]:
    """A headless Chromium without a network; skips the tests where there is none."""
    api = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip(f"no {', '.join(names)} on PATH")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=program,
            args=["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND"],
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(
    browser: Browser,
    path: Path,
    *,
    width: int = SCREEN,
    dark: bool = False,
    clock: bool = False,
) -> Iterator[tuple[Page, list[str]]]:
    """A page that has drawn its figures, and what the browser complained of so far."""
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if dark else "light",
    )
    context.set_default_timeout(_PATIENCE)
    try:
        page = context.new_page()
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        if clock:
            page.clock.install()
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=yes]")
        yield page, problems
    finally:
        context.close()


def check(page: Page, problems: list[str]) -> None:
    """Nothing failed, sticks out, is cut, is pale, collides, or is not drawn."""
    assert problems == []
    width = page.viewport_size["width"] if page.viewport_size else 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(_OVERFLOW) == []
    assert page.evaluate(_CUT) == []
    assert page.evaluate(_PALE) == []
    assert page.evaluate(_COLLIDING) == []
    assert page.evaluate(_SQUEEZED) == []
    plots = page.locator(".plot")
    for i in range(plots.count()):
        drawn = plots.nth(i).locator(".trace, .point, .hm")
        assert drawn.count(), plots.nth(i).get_attribute("id")
    for section in page.locator("main section").all():
        assert len(section.inner_text()) > 20


def boxes(page: Page, selector: str) -> list[dict[str, Any]]:
    """Where elements are, with their text."""
    found: list[dict[str, Any]] = page.evaluate(
        """(selector) => [...document.querySelectorAll(selector)].map((one) => {
          const { left, right, top, bottom } = one.getBoundingClientRect();
          return { left, right, top, bottom, text: one.textContent };
        }).filter((box) => box.text)""",
        selector,
    )
    return found
