// Draws the figures in the colours of the page, sorts tables, and keeps a live page new.
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
      "legend.yref": "container", "legend.yanchor": "bottom", "legend.y": 0,
      "hoverlabel.bgcolor": colour("--panel"), "hoverlabel.font.color": ink,
    };
  };

  // plotly.js lies in the page packed by gzip, in base 64.
  const unpack = async (text) => {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Response(bytes).body.pipeThrough(
      new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  };

  // On a phone the legend takes many lines; the data keep half of the height.
  const leaveRoom = async (div, height) => {
    const area = div.querySelector(".nsewdrag");
    const missing = area ? height / 2 - area.getBoundingClientRect().height : 0;
    div.style.height = `${height + Math.max(missing, 0)}px`;
    if (missing > 0) { await Plotly.relayout(div, { height: height + missing }); }
  };

  const draw = async (div) => {
    const data = document.getElementById(`${div.id}-data`).textContent;
    const ink = JSON.stringify(colour("--ink"));
    const figure = JSON.parse(data.replaceAll('"#222222"', ink));
    if (matchMedia("(pointer: coarse)").matches) { figure.layout.dragmode = false; }
    const options = { responsive: true, displayModeBar: false };
    const { height } = figure.layout;
    await Plotly.newPlot(div, figure.data, figure.layout, options);
    await Plotly.relayout(div, theme());
    await leaveRoom(div, height);
    const select = document.getElementById(`${div.id}-select`);
    if (select) {
      select.onchange = () => {
        Plotly.update(div, ...figure.buttons[select.selectedIndex].args);
      };
      if (select.selectedIndex) { select.onchange(); }
    }
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

  const sortBy = (table, column, down) => {
    const headers = [...table.tHead.rows[0].cells], header = headers[column];
    headers.forEach((other) => other.removeAttribute("aria-sort"));
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = table.tBodies[0];
    const rows = [...body.rows].map(
      (row, place) => [row, row.cells[column].dataset.sort, place]);
    rows.sort(compare(header.dataset.kind === "text", down ? -1 : 1));
    body.append(...rows.map(([row]) => row));
  };

  const makeSortable = (table) => {
    [...table.tHead.rows[0].cells].forEach((header, column) => {
      header.querySelector("button")?.addEventListener("click", () => {
        sortBy(table, column, header.getAttribute("aria-sort") !== "descending");
      });
    });
  };

  // A box that cuts something says so; only long tables have an end of their own.
  const hintAtMore = (box) => {
    if (box.querySelectorAll("tbody > tr").length > 40) { box.classList.add("long"); }
    const hint = document.createElement("p");
    hint.className = "soft small";
    box.before(hint);
    const look = () => {
      const right = box.scrollWidth > box.clientWidth + 1;
      const down = box.scrollHeight > box.clientHeight + 1;
      hint.hidden = !right && !down;
      hint.textContent = "Scroll inside: there is more "
        + [down && "below ↓", right && "to the right →"].filter(Boolean).join(" and ");
    };
    new ResizeObserver(look).observe(box);
    [...box.children].forEach((child) => new ResizeObserver(look).observe(child));
  };

  // The slider shows what attacks rebuilt at one audit or another.
  const slide = (input) => {
    const words = JSON.parse(input.dataset.words);
    const pairs = document.querySelectorAll("[data-when]");
    const show = () => {
      input.setAttribute("aria-valuetext", words[input.value]);
      document.querySelector(`output[for=${input.id}]`).value = words[input.value];
      pairs.forEach((pair) => { pair.hidden = pair.dataset.when !== input.value; });
    };
    input.addEventListener("input", show);
    show();
  };

  // While training goes on the page reads itself again, and keeps the reader's place.
  const KEY = `leakwatch ${location.pathname}`, EVERY = 30, CALM = 8;
  const marked = () => [...document.querySelectorAll("main section[id]")];

  const remember = () => {
    const section = marked().findLast((one) => one.getBoundingClientRect().top < 80);
    const slider = document.getElementById("when");
    return {
      section: section?.id,
      offset: section ? section.getBoundingClientRect().top : -scrollY,
      selects: [...document.querySelectorAll("select")].map((s) => [s.id, s.value]),
      // The last audit stays the last one.
      when: slider && slider.value !== slider.max ? slider.value : null,
      open: [...document.querySelectorAll("details")].map((d) => d.open),
      sorted: [...document.querySelectorAll("table.sort")].map((table) => {
        const heads = [...table.tHead.rows[0].cells];
        const column = heads.findIndex((head) => head.hasAttribute("aria-sort"));
        const way = column < 0 ? "" : heads[column].getAttribute("aria-sort");
        return [column, way === "descending"];
      }),
      boxes: [...document.querySelectorAll(".scroll, .tall")].map(
        (box) => [box.scrollLeft, box.scrollTop]),
      focus: document.activeElement?.id,
    };
  };

  const restore = (place) => {
    place.selects.forEach(([id, value]) => {
      const select = document.getElementById(id);
      if (!select || ![...select.options].some((o) => o.value === value)) { return; }
      select.value = value;
      select.dispatchEvent(new Event("change"));
    });
    const slider = document.getElementById("when");
    if (slider && place.when !== null) {
      slider.value = place.when;
      slider.dispatchEvent(new Event("input"));
    }
    document.querySelectorAll("details").forEach((details, i) => {
      details.open = place.open[i] ?? details.open;
    });
    document.querySelectorAll("table.sort").forEach((table, i) => {
      const [column, down] = place.sorted[i] ?? [-1];
      if (column >= 0) { sortBy(table, column, down); }
    });
    document.querySelectorAll(".scroll, .tall").forEach((box, i) => {
      box.scrollTo(...(place.boxes[i] ?? [0, 0]));
    });
    if (place.focus) {
      document.getElementById(place.focus)?.focus({ preventScroll: true });
    }
    const section = place.section && document.getElementById(place.section);
    const top = section ? section.getBoundingClientRect().top + scrollY : 0;
    scrollTo({ top: top - place.offset, behavior: "instant" });
  };

  // A page that may not keep anything starts at the top.
  const store = (value) => {
    try { sessionStorage.setItem(KEY, JSON.stringify(value)); } catch { /* no store */ }
  };
  const stored = () => {
    try { return JSON.parse(sessionStorage.getItem(KEY)) ?? {}; } catch { return {}; }
  };

  const stayLive = (state) => {
    const pause = document.getElementById("pause");
    const time = document.querySelector(".live time");
    time.textContent = new Date(root.dataset.written).toLocaleTimeString();
    let paused = Boolean(state.paused), acted = 0;
    const say = () => { pause.textContent = paused ? "Go on" : "Pause"; };
    pause.hidden = false;
    pause.addEventListener("click", () => {
      paused = !paused;
      store({ paused });
      say();
    });
    say();
    ["pointerdown", "keydown", "wheel", "touchmove"].forEach((kind) => {
      addEventListener(kind, () => { acted = Date.now(); }, { passive: true });
    });
    const again = () => {
      const busy = Date.now() - acted < CALM * 1000 || !getSelection().isCollapsed;
      if (paused || busy || document.hidden) { setTimeout(again, 2000); return; }
      store({ place: remember() });
      location.reload();
    };
    setTimeout(again, EVERY * 1000);
  };

  document.querySelectorAll(".scroll, .tall").forEach(hintAtMore);
  document.querySelectorAll("table.sort").forEach(makeSortable);
  document.querySelectorAll("input[data-words]").forEach(slide);
  const plots = [...document.querySelectorAll(".plot")];
  const packed = document.getElementById("library");
  const library = packed ? unpack(packed.textContent) : Promise.resolve();
  Promise.all(plots.map((div) => library.then(() => draw(div)).catch((error) => {
    div.textContent = `This figure could not be drawn: ${error}`;
    console.error(error);
  }))).then(() => {
    const state = stored();
    if (state.place) {
      restore(state.place);
      store({});
    }
    if (root.dataset.written) { stayLive(state); }
    root.dataset.ready = "yes";
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    plots.forEach(draw);
  });
})();
