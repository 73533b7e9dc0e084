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
