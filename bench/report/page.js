"use strict";
/* Draw the charts, sort tables on a click, and build the table of contents. */
(() => {
  const DARK = window.matchMedia("(prefers-color-scheme: dark)"), NARROW_PIXELS = 560;
  const own = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  /* Listed explicitly: the default has a button that sends the data to plotly's server. */
  const CONFIG = { responsive: true, displaylogo: false, displayModeBar: true, showTips: false, plotlyServerURL: "",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };

  function axis() {
    return { gridcolor: own("grid"), linecolor: own("axis"), zeroline: false, zerolinecolor: own("axis"), ticks: "outside",
      tickcolor: own("axis"), ticklen: 4, automargin: true, ticklabeloverflow: "allow", title: { font: { size: 12 }, standoff: 8 }, exponentformat: "none",
      separatethousands: true };
  }
  function style(isNarrow) {
    const ink = own("ink"), back = own("page");
    return {
      height: isNarrow ? 320 : 350, margin: { l: isNarrow ? 44 : 58, r: isNarrow ? 14 : 20, t: 14, b: 44 }, hovermode: "closest", separators: ".,",
      font: { family: "Helvetica Neue, Helvetica, Arial, Liberation Sans, sans-serif", size: 12, color: ink },
      paper_bgcolor: back, plot_bgcolor: back, bargap: 0.28, dragmode: isNarrow ? false : "zoom",
      hoverlabel: { bgcolor: back, bordercolor: own("axis"), font: { color: ink, size: 12 }, align: "left", namelength: -1 },
      legend: { orientation: "h", traceorder: "normal", x: 0, y: 0, yref: "container", xanchor: "left", yanchor: "bottom", font: { size: 11.5 } },
      modebar: { bgcolor: back, color: own("axis"), activecolor: own("blue") },
    };
  }

  const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  function merged(base, more) {
    const all = { ...base };
    for (const [key, value] of Object.entries(more)) all[key] = isObject(value) && isObject(base[key]) ? merged(base[key], value) : value;
    return all;
  }

  /* Colours of charts are those of a white page. On a dark one, grey is inverted, and hues are made lighter, or darker if they are pale. */
  function inDark(color) {
    const wide = color.length === 4 ? color.replace(/[0-9a-f]/gi, "$&$&") : color;
    const [red, green, blue] = [1, 3, 5].map((place) => Number.parseInt(wide.slice(place, place + 2), 16) / 255);
    const high = Math.max(red, green, blue), low = Math.min(red, green, blue), light = (high + low) / 2, range = high - low;
    if (light === 1) return own("page");
    const strength = range / (1 - Math.abs(2 * light - 1) || 1);
    const sixth = range === 0 ? 0 : high === red ? ((green - blue) / range + 6) % 6 : high === green ? (blue - red) / range + 2 : (red - green) / range + 4;
    const lighter = strength < 0.2 ? 1.02 - light : light > 0.66 ? 1.12 - light : Math.max(0.6, light);
    return `hsl(${Math.round(60 * sixth)}, ${Math.round(100 * Math.min(strength, 0.8))}%, ${Math.round(100 * lighter)}%)`;
  }
  function colored(value) {
    if (typeof value === "string") return /^#([0-9a-f]{3}|[0-9a-f]{6})$/i.test(value) ? inDark(value) : value;
    if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map(colored);
    return isObject(value) ? Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, colored(inner)])) : value;
  }

  function draw(plot, view, name) {
    const isNarrow = plot.clientWidth < NARROW_PIXELS, { traces, layout, narrow } = DARK.matches ? colored(view) : view;
    const whole = merged(style(isNarrow), isNarrow && narrow ? merged(layout, narrow) : layout);
    for (const key of new Set(["xaxis", "yaxis", ...Object.keys(whole).filter((key) => /^[xy]axis\d*$/.test(key))])) {
      whole[key] = merged(axis(), whole[key] ?? {});
      if (isNarrow && !whole[key].tickvals) whole[key].nticks ??= 5;
    }
    const config = { ...CONFIG, toImageButtonOptions: { format: "svg", filename: name } };
    plot.isNarrow = isNarrow;
    return Plotly.react(plot, structuredClone(traces), whole, config);
  }

  function prepare(place, chart) {
    place.replaceChildren();
    const head = place.appendChild(document.createElement("div")), plot = place.appendChild(document.createElement("div"));
    head.className = "head";
    plot.className = "plot";
    if (place.dataset.title) head.append(place.dataset.title);
    let shown = 0;
    const show = (number) => {
      shown = number;
      for (const [place, button] of [...head.querySelectorAll("button")].entries()) button.setAttribute("aria-pressed", place === number);
      draw(plot, chart.views[number], place.dataset.chart);
    };
    if (chart.views.length > 1) {
      const views = head.appendChild(document.createElement("span"));
      views.className = "views";
      for (const [number, view] of chart.views.entries()) {
        const button = views.appendChild(document.createElement("button"));
        button.type = "button";
        button.textContent = view.name;
        button.addEventListener("click", () => show(number));
      }
    }
    if (!head.hasChildNodes()) head.remove();
    place.draw = () => { delete place.draw; place.again(); };
    place.again = () => { if (!place.draw) show(shown); };
    place.update = (newer) => { chart = newer; shown = Math.min(shown, chart.views.length - 1); place.again(); };
    place.hasChanged = () => !place.draw && plot.isNarrow !== plot.clientWidth < NARROW_PIXELS;
  }

  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) if (isIntersecting && target.draw) target.draw();
  }, { rootMargin: "600px" });

  /* Show charts, by their ids; those that are there already are updated. */
  function showCharts(charts) {
    for (const place of document.querySelectorAll(".chart")) {
      const chart = charts[place.dataset.chart];
      if (!chart) continue;
      if (place.update) place.update(chart);
      else { prepare(place, chart); seen.observe(place); }
    }
  }
  function drawCharts() {
    const places = () => [...document.querySelectorAll(".chart")].filter((place) => place.update);
    showCharts(JSON.parse(document.getElementById("charts").textContent));
    DARK.addEventListener("change", () => places().forEach((place) => place.again()));
    window.addEventListener("resize", () => places().filter((place) => place.hasChanged()).forEach((place) => place.again()));
    window.addEventListener("beforeprint", () => places().forEach((place) => place.draw?.()));
  }

  /* The plotting library is packed in the page, and the page's policy allows exactly its text. */
  async function library() {
    const packed = document.getElementById("library");
    if (window.Plotly || !packed) return;
    const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
    const script = document.createElement("script");
    script.textContent = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    document.head.append(script);
  }

  /* A cell sorts by its data-value, else by its text; cells without either come last. */
  function key(row, column) {
    const cell = row.cells[column];
    const text = cell?.dataset.value ?? cell?.textContent.trim() ?? "";
    const value = Number.parseFloat(text.replaceAll(",", ""));
    return { text, number: /^[-+]?[\d.,]+/.test(text) ? value : Number.NaN, isBlank: text === "" };
  }
  function compared(first, second) {
    if (Number.isNaN(first.number) || Number.isNaN(second.number)) return first.text.localeCompare(second.text, "en", { numeric: true });
    return first.number - second.number;
  }
  function sort(body, column, sign) {
    const groups = [];
    for (const row of body.original) row.classList.contains("more") ? groups.at(-1).push(row) : groups.push([row]);
    const keyed = groups.map((group) => ({ group, key: key(group[0], column) }));
    if (sign) keyed.sort((a, b) => a.key.isBlank - b.key.isBlank || sign * compared(a.key, b.key));
    body.append(...keyed.flatMap(({ group }) => group));
  }
  function makeSortable(table) {
    const body = table.tBodies[0], headings = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
    if (!body || body.rows.length < 2) return;
    body.original = [...body.rows];
    for (const [column, heading] of headings.entries()) {
      if (!heading.textContent.trim()) continue;
      const turn = () => {
        const next = { ascending: "descending", descending: "none" }[heading.getAttribute("aria-sort")] ?? "ascending";
        for (const other of headings) other.removeAttribute("aria-sort");
        if (next !== "none") heading.setAttribute("aria-sort", next);
        sort(body, Number(heading.dataset.column ?? column), { ascending: 1, descending: -1, none: 0 }[next]);
      };
      heading.classList.add("sortable");
      heading.tabIndex = 0;
      heading.title = "Sort";
      heading.addEventListener("click", turn);
      heading.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); turn(); } });
    }
  }

  /* On a narrow screen a row of a short table is a card, whose lines have the headings of the columns. */
  const MOST_CARDS = 30, LONG_LETTERS = 48;
  function makeStackable(table) {
    const headings = [...table.tHead.rows[table.tHead.rows.length - 1].cells].map((cell) => cell.innerText.replaceAll(/\s+/g, " ").trim());
    const rows = [...table.tBodies].flatMap((body) => [...body.rows]);
    if (headings.length < 3 || rows.length > MOST_CARDS) return;
    table.classList.add("stacked");
    for (const row of rows) {
      for (const [column, cell] of [...row.cells].entries()) {
        cell.dataset.label = headings[column] ?? "";
        if (cell.textContent.trim() === "" && !cell.firstElementChild) cell.replaceChildren();
        if (column && cell.textContent.trim().length > LONG_LETTERS) cell.classList.add("long");
      }
    }
  }
  /* A caption as wide as the screen, below the area that scrolls. */
  function moveCaption(caption) {
    const box = caption.closest(".scroll"), text = document.createElement("p");
    text.className = "caption";
    text.append(...caption.childNodes);
    text.id = `caption-${document.querySelectorAll(".caption").length + 1}`;
    caption.closest("table").setAttribute("aria-describedby", text.id);
    caption.remove();
    if (text.textContent.trim()) box.after(text);
  }

  function listContents() {
    const headings = [...document.querySelectorAll("main h2, main h3")], nav = document.getElementById("contents");
    if (!nav || headings.length < 3) return;
    const box = nav.appendChild(document.createElement("details")), list = document.createElement("ul"), links = new Map();
    box.appendChild(document.createElement("summary")).textContent = "Contents";
    box.open = window.matchMedia("(min-width: 1180px)").matches;
    const hasParts = document.querySelector("main h2");
    for (const [number, heading] of headings.entries()) {
      heading.id ||= `part-${number + 1}`;
      const item = list.appendChild(document.createElement("li")), link = item.appendChild(document.createElement("a"));
      const folded = heading.closest("main details");
      item.className = heading.tagName === "H3" && hasParts ? "inner" : "";
      link.href = `#${heading.id}`;
      link.textContent = heading.textContent;
      if (folded) {
        item.hidden = !folded.open;
        folded.addEventListener("toggle", () => { item.hidden = !folded.open; });
      }
      const own = heading.tagName === "H2" ? heading.parentElement.querySelector(":scope > details") : null;
      link.addEventListener("click", () => { if (own) own.open = true; });
      links.set(heading, link);
    }
    box.append(list);
    const mark = () => {
      const above = headings.filter((heading) => heading.offsetParent && heading.getBoundingClientRect().top < 120).at(-1);
      for (const [heading, link] of links) link.classList.toggle("here", heading === above);
    };
    document.addEventListener("scroll", mark, { passive: true });
    mark();
  }

  document.documentElement.classList.add("js");
  document.querySelectorAll("table:has(thead)").forEach((table) => { makeSortable(table); makeStackable(table); });
  document.querySelectorAll(".scroll caption").forEach(moveCaption);
  listContents();
  library().then(() => { if (window.Plotly) drawCharts(); });
  window.runstop = { showCharts };
})();
