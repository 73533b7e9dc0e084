// Draws the figures in the colours of the page, and sorts tables.
(() => {
  "use strict";
  const root = document.documentElement;
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  const theme = () => {
    const ink = colour("--ink"), grid = colour("--grid"), soft = colour("--soft");
    return {
      "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
      "font.color": ink, "xaxis.gridcolor": grid, "yaxis.gridcolor": grid,
      "xaxis.linecolor": soft, "yaxis.linecolor": soft,
      "xaxis.tickcolor": soft, "yaxis.tickcolor": soft,
      "hoverlabel.bgcolor": colour("--panel"), "hoverlabel.font.color": ink,
    };
  };

  const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    + "!#$%&()*+-;:=>?@^_`{|}~";

  // plotly.js lies in the page deflated, in base 85: its size in bytes, a blank, and
  // five digits for four bytes.
  const unpack = async (text) => {
    const [size, packed] = text.split(" ");
    const value = new Uint8Array(128);
    [...DIGITS].forEach((digit, place) => { value[digit.charCodeAt(0)] = place; });
    const bytes = new DataView(new ArrayBuffer(packed.length / 5 * 4));
    for (let i = 0, j = 0; i < packed.length; j += 4) {
      let word = 0;
      for (const end = i + 5; i < end; i++) {
        word = word * 85 + value[packed.charCodeAt(i)];
      }
      bytes.setUint32(j, word);
    }
    const stream = new Response(bytes.buffer.slice(0, Number(size))).body.pipeThrough(
      new DecompressionStream("deflate-raw"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  };

  const draw = async (div) => {
    const figure = JSON.parse(document.getElementById(`${div.id}-data`).textContent);
    if (matchMedia("(pointer: coarse)").matches) { figure.layout.dragmode = false; }
    const options = { responsive: true, displayModeBar: false };
    await Plotly.newPlot(div, figure.data, figure.layout, options);
    await Plotly.relayout(div, theme());
    const select = document.getElementById(`${div.id}-select`);
    select?.addEventListener("change", () => {
      Plotly.update(div, ...figure.buttons[select.selectedIndex].args);
    });
    div.dataset.drawn = "yes";
  };

  // Sorts rows by a column; entries are [row, key, place before].
  const compare = (isText, sign) => ([, one, place], [, other, otherPlace]) => {
    // A value that is not known is not the safest one: it stays on top.
    if (!one || !other) { return Boolean(one) - Boolean(other) || place - otherPlace; }
    const order = isText ? one.localeCompare(other) : Number(one) - Number(other);
    // Infinity minus infinity is no order.
    return (Number.isNaN(order) ? 0 : sign * order) || place - otherPlace;
  };

  const makeSortable = (table) => {
    const body = table.tBodies[0], headers = [...table.tHead.rows[0].cells];
    headers.forEach((header, column) => {
      header.querySelector("button")?.addEventListener("click", () => {
        const down = header.getAttribute("aria-sort") !== "descending";
        headers.forEach((other) => other.removeAttribute("aria-sort"));
        header.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].map(
          (row, place) => [row, row.cells[column].dataset.sort, place]);
        rows.sort(compare(header.dataset.kind === "text", down ? -1 : 1));
        body.append(...rows.map(([row]) => row));
      });
    });
  };

  // A table that is cut at the side says so.
  const hintAtMore = (box) => {
    const hint = document.createElement("p");
    hint.className = "soft small";
    hint.textContent = "Scroll sideways: there are more columns →";
    box.before(hint);
    new ResizeObserver(() => { hint.hidden = box.scrollWidth <= box.clientWidth; })
      .observe(box);
  };

  document.querySelectorAll(".scroll").forEach(hintAtMore);
  document.querySelectorAll("table.sort").forEach(makeSortable);
  const plots = [...document.querySelectorAll(".plot")];
  const packed = document.getElementById("library");
  const library = packed ? unpack(packed.textContent) : Promise.resolve();
  Promise.all(plots.map((div) => library.then(() => draw(div)).catch((error) => {
    div.textContent = `This figure could not be drawn: ${error}`;
    console.error(error);
  }))).then(() => { root.dataset.ready = "yes"; });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    plots.forEach((div) => Plotly.relayout(div, theme()));
  });
})();
