"""Style sheet and script of the report: plain CSS and JavaScript, no network."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root {
  --bg: #f4f6f8; --panel: #ffffff; --ink: #17202a; --soft: #596575;
  --line: #dfe4ea; --grid: #e6eaef; --accent: #0072b2; --wash: #eef4f9;
  --low: #00795a; --middle: #8a5a00; --high: #b84300; --warn: #9a3412;
  --warn-bg: #fff4e8; --warn-line: #f0c190;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #11161c; --panel: #1a2129; --ink: #e6ebf0; --soft: #9aa7b5;
    --line: #2d3742; --grid: #2a343f; --accent: #56b4e9; --wash: #1f2a35;
    --low: #3fc79b; --middle: #e6b450; --high: #ff8f52; --warn: #ffb27a;
    --warn-bg: #33241a; --warn-line: #6b4427;
  }
  :root { color-scheme: dark; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  overflow-wrap: anywhere;
}
main, .top > div { max-width: 1120px; margin: 0 auto; padding: 0 20px; }
.top { background: var(--panel); border-bottom: 1px solid var(--line); }
.top > div { padding-top: 18px; padding-bottom: 14px; }
.brand {
  font-size: 12px; letter-spacing: .09em; text-transform: uppercase;
  color: var(--accent); font-weight: 700;
}
h1 { font-size: 25px; line-height: 1.25; margin: 2px 0 4px; }
h2 { font-size: 19px; margin: 34px 0 10px; line-height: 1.3; }
h3 { font-size: 15.5px; margin: 0; line-height: 1.35; }
p { margin: 0 0 10px; max-width: 78ch; }
.soft, .sub { color: var(--soft); } .small { font-size: 11.5px; }
.sub { font-size: 13px; margin: 0; }
nav { margin-top: 10px; display: flex; flex-wrap: wrap; gap: 4px 16px; }
nav a { font-size: 13.5px; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
.lead { font-size: 17px; line-height: 1.5; margin: 22px 0 16px; max-width: 74ch; }
.cards {
  display: flex; flex-wrap: wrap; gap: 12px; margin: 0 0 16px;
}
.card, .panel {
  background: var(--panel); border: 1px solid var(--line); border-radius: 10px;
}
.card { padding: 14px 16px; display: flex; gap: 12px; min-width: 0; flex: 1 1 180px; }
.card.wide { flex: 1.3 1 235px; }
.card > div { min-width: 0; }
.card > img { width: 64px; height: 64px; }
.card .name { font-size: 13px; color: var(--soft); }
.card .big { font-size: 27px; font-weight: 650; line-height: 1.2; }
.card .note { font-size: 13px; color: var(--soft); }
.big, td.num { font-variant-numeric: tabular-nums; }
.low { color: var(--low); } .middle { color: var(--middle); }
.high { color: var(--high); } .unknown { color: var(--warn); }
.panel { margin: 0 0 14px; padding: 14px 16px; min-width: 0; }
.panel > .head {
  display: flex; flex-wrap: wrap; gap: 8px 16px; justify-content: space-between;
  align-items: flex-start; margin-bottom: 6px;
}
.head > div { flex: 1 1 260px; }
select {
  font: inherit; font-size: 14px; color: var(--ink); background: var(--panel);
  border: 1px solid var(--line); border-radius: 7px; padding: 5px 8px;
  max-width: 100%;
}
.plot { width: 100%; min-width: 0; }
.tall { max-height: 620px; overflow-y: auto; overflow-x: hidden; }
.two { display: grid; gap: 14px; grid-template-columns: minmax(0, 1fr); }
@media (min-width: 940px) { .two { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
.two > .panel { margin: 0; } .two > .panel:only-child { grid-column: 1 / -1; }
.notice {
  background: var(--warn-bg); border: 1px solid var(--warn-line);
  border-left-width: 4px; border-radius: 8px; padding: 10px 14px; margin: 0 0 14px;
}
.notice strong { color: var(--warn); }
.notice.calm { background: var(--wash); border-color: var(--line); }
.notice.calm strong { color: var(--ink); }
.notice ul { margin: 4px 0 0; padding-left: 20px; }
.strip { margin: 2px 0 4px; }
.band { position: relative; height: 46px; border-radius: 7px; overflow: hidden;
  display: flex; border: 1px solid var(--line); }
.band > span { height: 100%; opacity: .16; flex: none; }
.band .z-low { background: var(--low); } .band .z-middle { background: var(--middle); }
.band .z-high { background: var(--high); }
.band > i {
  position: absolute; width: 11px; height: 11px; margin: -5.5px 0 0 -5.5px;
  border-radius: 50%; background: var(--accent); opacity: .72;
  border: 1.5px solid var(--panel);
}
.band > b { position: absolute; top: 0; bottom: 0; width: 3px; margin-left: -1.5px;
  background: var(--ink); }
.band > b.guess { width: 0; margin-left: 0; background: none;
  border-left: 1.5px dashed var(--soft); }
.scale { position: relative; height: 18px; font-size: 12px; color: var(--soft); }
.scale span { position: absolute; transform: translateX(-50%); white-space: nowrap; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: 13px;
  color: var(--soft); }
.legend em { font-style: normal; font-weight: 600; }
.scroll { overflow: auto; border: 1px solid var(--line); border-radius: 8px;
  background: var(--panel); max-height: 640px; }
.scroll + p, .two + p { margin-top: 16px; }
.scroll + .notice, .two + .notice, .scroll + h3 { margin-top: 16px; }
h3 + p { margin-top: 6px; }
.scroll:focus-visible { outline: 2px solid var(--accent); }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: 13.5px; }
th, td { padding: 7px 10px; text-align: left; vertical-align: middle;
  border-bottom: 1px solid var(--line); overflow-wrap: normal; }
tbody tr:last-child > * { border-bottom: 0; }
thead th { position: sticky; top: 0; background: var(--wash); z-index: 1;
  vertical-align: bottom; white-space: nowrap; font-weight: 600; }
.sticky td:first-child, .sticky th:first-child { position: sticky; left: 0; }
.sticky td:first-child { background: var(--panel); }
.sticky th:first-child { z-index: 2; }
th small { display: block; font-weight: 400; color: var(--soft); font-size: 11.5px; }
th.num, td.num { text-align: right; white-space: nowrap; }
td.why { min-width: 340px; } td.remark { min-width: 300px; }
td.name { white-space: nowrap; } td.text { min-width: 240px; }
td.mono, th.mono { font-family: ui-monospace, Consolas, monospace; font-size: 12.5px; }
td img, .card > img {
  display: block; object-fit: contain; border-radius: 5px;
  background: var(--wash); border: 1px solid var(--line); image-rendering: pixelated;
}
td img { width: 44px; height: 44px; }
td img.shot { width: 64px; height: 64px; }
.pair { display: flex; gap: 8px; align-items: center; }
td.who { white-space: nowrap; font-variant-numeric: tabular-nums; }
td.who > div { display: flex; align-items: center; gap: 9px; }
th button {
  all: unset; cursor: pointer; font-weight: 600; display: inline-flex; gap: 5px;
}
th button:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
th button::after { content: "\\2195"; color: var(--soft); opacity: .6; }
th[aria-sort="ascending"] button::after { content: "\\2191"; opacity: 1; }
th[aria-sort="descending"] button::after { content: "\\2193"; opacity: 1; }
.bad, .about {
  display: inline-block; border-radius: 5px; padding: 0 7px; font-size: 12.5px;
  font-weight: 600; white-space: nowrap; border: 1px solid var(--warn-line);
  background: var(--warn-bg); color: var(--warn);
}
.about { border-color: var(--line); background: var(--wash); color: var(--soft); }
.fine { color: var(--low); }
details > summary { cursor: pointer; color: var(--accent); margin: 4px 0 8px; }
.limits { padding-left: 20px; max-width: 80ch; } .limits li { margin-bottom: 8px; }
footer { margin: 36px auto 30px; color: var(--soft); font-size: 13px; }
@media (max-width: 560px) {
  main, .top > div { padding-left: 12px; padding-right: 12px; }
  h1 { font-size: 21px; } .lead { font-size: 16px; }
  .panel { padding: 12px 10px; } .card { padding: 12px; }
  .cards { gap: 8px; } .card { flex-basis: 155px; }
  .card .big { font-size: 22px; } .card > img { width: 44px; height: 44px; }
  .card.wide { flex-basis: 100%; }
  .plot .legend text { font-size: 11px; }
}
@media print { nav, select { display: none; } .scroll { max-height: none; } }
"""

SCRIPT: Final = """
(function () {
  "use strict";
  var root = document.documentElement;

  function colour(name) {
    return getComputedStyle(root).getPropertyValue(name).trim();
  }

  function theme() {
    var ink = colour("--ink"), grid = colour("--grid"), soft = colour("--soft");
    return {
      "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
      "font.color": ink, "xaxis.gridcolor": grid, "yaxis.gridcolor": grid,
      "xaxis.linecolor": soft, "yaxis.linecolor": soft,
      "xaxis.tickcolor": soft, "yaxis.tickcolor": soft,
      "hoverlabel.bgcolor": colour("--panel"), "hoverlabel.font.color": ink
    };
  }

  function draw(div) {
    var figure = JSON.parse(document.getElementById(div.id + "-data").textContent);
    var touch = window.matchMedia("(pointer: coarse)").matches;
    if (touch) { figure.layout.dragmode = false; }
    return Plotly.newPlot(div, figure.data, figure.layout, {
      responsive: true, displayModeBar: false
    }).then(function () {
      return Plotly.relayout(div, theme());
    }).then(function () {
      var select = document.getElementById(div.id + "-select");
      if (select) {
        select.addEventListener("change", function () {
          var args = figure.buttons[select.selectedIndex].args;
          Plotly.update(div, args[0], args[1]);
        });
      }
      div.dataset.drawn = "yes";
    });
  }

  function sortable(table) {
    var body = table.tBodies[0];
    Array.prototype.forEach.call(table.tHead.rows[0].cells, function (cell, column) {
      var button = cell.querySelector("button");
      if (!button) { return; }
      button.addEventListener("click", function () {
        var down = cell.getAttribute("aria-sort") !== "descending";
        Array.prototype.forEach.call(cell.parentNode.cells, function (other) {
          other.removeAttribute("aria-sort");
        });
        cell.setAttribute("aria-sort", down ? "descending" : "ascending");
        var rows = Array.prototype.map.call(body.rows, function (row, place) {
          return [row, row.cells[column].dataset.sort, place];
        });
        rows.sort(function (one, two) {
          // A value that is not known is not the safest one: it stays on top.
          if (!one[1] || !two[1]) {
            return (one[1] ? 1 : 0) - (two[1] ? 1 : 0) || one[2] - two[2];
          }
          var order = cell.dataset.kind === "text"
            ? one[1].localeCompare(two[1]) : Number(one[1]) - Number(two[1]);
          if (order !== order) { order = 0; }
          return (down ? -order : order) || one[2] - two[2];
        });
        rows.forEach(function (entry) { body.appendChild(entry[0]); });
      });
    });
  }

  Array.prototype.forEach.call(document.querySelectorAll("table.sort"), sortable);
  var plots = Array.prototype.slice.call(document.querySelectorAll(".plot"));
  Promise.all(plots.map(function (div) {
    return Promise.resolve().then(function () { return draw(div); })
      .catch(function (error) {
        div.textContent = "This figure could not be drawn: " + error;
        console.error(error);
      });
  })).then(function () { root.dataset.ready = "yes"; });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener(
    "change", function () {
      plots.forEach(function (div) { Plotly.relayout(div, theme()); });
    });
})();
"""
