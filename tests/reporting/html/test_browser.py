"""The report in a real browser: errors, drawn figures, width."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leakwatch.reporting import RiskLedger, write_report

pytest.importorskip("plotly")

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH"
)

# A headless window is never narrower than about 500 pixels, a frame is: the report
# runs in a frame of the wanted width and tells its parent what it sees.
PROBE = """<script>
window.problems = [];
window.addEventListener("error", function (event) { problems.push(event.message); });
window.addEventListener("unhandledrejection", function (event) {
  problems.push(String(event.reason)); });
document.addEventListener("securitypolicyviolation", function (event) {
  problems.push("blocked: " + event.blockedURI + " " + event.violatedDirective); });
</script>"""
ASK = """<script>
(function wait() {
  var root = document.documentElement;
  if (root.dataset.ready !== "yes") { setTimeout(wait, 50); return; }
  ACTION
  setTimeout(function () {
    var column = document.querySelector("#samples td:nth-child(3)");
    parent.postMessage(JSON.stringify({
      width: window.innerWidth, content: root.scrollWidth,
      wide: Array.prototype.filter.call(document.querySelectorAll("main > *, .panel"),
        function (element) {
          return element.getBoundingClientRect().right > innerWidth + 1; }).length,
      plots: document.querySelectorAll(".plot").length,
      drawn: document.querySelectorAll(".plot > .plot-container .main-svg").length,
      traces: Array.prototype.map.call(document.querySelectorAll(".plot"),
        function (plot) {
          return plot.querySelectorAll(".trace, .point, .hm").length; }),
      plot_widths: Array.prototype.map.call(document.querySelectorAll(".plot"),
        function (plot) {
          return plot.querySelector(".main-svg").getBoundingClientRect().width; }),
      axis: document.querySelector("#fig-risk .ytitle").textContent,
      first: column ? column.textContent : "", problems: problems
    }), "*");
  }, 300);
})();
</script>"""
HARNESS = """<!DOCTYPE html><body style="margin:0">
<iframe src="page.html" style="border:0;width:WIDTHpx;height:900px"></iframe>
<script>window.addEventListener("message", function (event) {
  document.body.dataset.seen = event.data; });</script></body>"""


def look(report: Path, folder: Path, width: int, action: str = "") -> dict[str, Any]:
    """Open a report at a width and return what the page saw of itself."""
    source = report.read_text("utf-8")
    head, rest = source.split("<style>", 1)
    body, end = rest.rsplit("</body>", 1)
    ask = ASK.replace("ACTION", action)
    page = f"{head}{PROBE}<style>{body}{ask}</body>{end}"
    (folder / "page.html").write_text(page, "utf-8")
    harness = folder / "harness.html"
    harness.write_text(HARNESS.replace("WIDTH", str(width)), "utf-8")
    result = subprocess.run(
        [
            str(BROWSER),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={folder / 'profile'}",
            "--enable-logging=stderr",
            "--v=0",
            f"--window-size={max(width, 500)},900",
            "--virtual-time-budget=30000",
            "--dump-dom",
            harness.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    match = re.search(r'data-seen="([^"]*)"', result.stdout)
    console = re.findall(r".*CONSOLE.*", result.stderr)
    assert match, f"the report never became ready: {console}"
    seen: dict[str, Any] = json.loads(match[1].replace("&quot;", '"'))
    seen["console"] = console
    return seen


def check(seen: dict[str, Any], width: int, plots: int) -> None:
    assert seen["console"] == []
    assert seen["problems"] == []
    assert seen["width"] == width
    assert seen["content"] <= width
    assert seen["wide"] == 0
    assert seen["plots"] == plots
    assert seen["drawn"] >= plots
    assert all(count > 0 for count in seen["traces"]), seen["traces"]
    assert all(0 < drawn <= width for drawn in seen["plot_widths"])


@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_draws_without_errors(
    make_run: Callable[..., RiskLedger], tmp_path: Path, width: int
) -> None:
    report = write_report(make_run().directory)
    seen = look(report, tmp_path, width)
    check(seen, width, plots=6)
    assert seen["axis"].startswith("i2f_bayes_psnr")
    assert seen["first"] == "failed"


def test_a_shared_library_draws_the_same(
    make_run: Callable[..., RiskLedger], tmp_path: Path
) -> None:
    report = write_report(make_run().directory, shared=True)
    assert report.stat().st_size < 3e5
    library = report.with_name("plotly.min.js")
    (tmp_path / library.name).write_bytes(library.read_bytes())
    check(look(report, tmp_path, 1280), 1280, plots=6)


def test_a_hundred_long_class_names_fit_a_phone(
    make_run: Callable[..., RiskLedger], tmp_path: Path
) -> None:
    ledger = make_run(classes=100, samples=100, epochs=(0,), rank=None)
    metadata = ledger.read_metadata()
    metadata["class_names"] = ["x" * 80 + f"<b>{n}" for n in range(100)]
    metadata["config"]["path"] = "y" * 300
    ledger.write_metadata(metadata)
    check(look(write_report(ledger.directory), tmp_path, 390), 390, plots=3)


def test_menu_and_headers_work(
    make_run: Callable[..., RiskLedger], tmp_path: Path
) -> None:
    ledger = make_run()
    report = write_report(ledger.directory)
    after = look(
        report,
        tmp_path,
        1280,
        'var menu = document.getElementById("fig-risk-select"); menu.value = "i2f";'
        'menu.dispatchEvent(new Event("change"));'
        'document.querySelector("#samples th:nth-child(1) button").click();',
    )
    assert after["axis"].startswith("i2f [pixel units]")
    last = [row for row in ledger.rows() if row.quantity == "i2f_bayes_psnr"][-1]
    assert (last.epoch, last.sample) == (20, 233)
    assert after["first"] == f"{last.value:.1f}"
    check(after, 1280, plots=6)


@pytest.mark.parametrize(
    ("damage", "key"),
    [
        (lambda text: text.replace('"use strict";', "missing();", 1), None),
        (
            lambda text: text.replace(
                "<main>", '<main><div style="width:700px">x</div>', 1
            ),
            "content",
        ),
        (
            lambda text: text.replace(
                "<main>", '<main><img src="https://example.org/a.png">', 1
            ),
            "problems",
        ),
    ],
    ids=["script error", "overflow", "request"],
)
def test_the_check_notices_damage(
    make_run: Callable[..., RiskLedger],
    tmp_path: Path,
    damage: Callable[[str], str],
    key: str | None,
) -> None:
    report = write_report(make_run(epochs=(0,), rank=None).directory)
    report.write_text(damage(report.read_text("utf-8")), "utf-8")
    if key is None:
        with pytest.raises(AssertionError, match=r"never became ready.*missing"):
            look(report, tmp_path, 390)
        return
    seen = look(report, tmp_path, 390)
    assert seen[key] != [] if key == "problems" else seen[key] > 390
    with pytest.raises(AssertionError):
        check(seen, 390, plots=3)
