"use strict";
/* Draw the charts, sort tables on a click, and build the table of contents. */
(() => {
  const INK = "#1d2329", SOFT = "#5b6670", LINE = "#e6eaed";
  const AXIS = { gridcolor: LINE, linecolor: "#9aa5af", zeroline: false, ticks: "outside", tickcolor: "#9aa5af",
    ticklen: 4, automargin: true, title: { font: { size: 12 }, standoff: 8 }, exponentformat: "none", separatethousands: true };
  const LAYOUT = {
    height: 350, margin: { l: 58, r: 14, t: 14, b: 44 }, hovermode: "closest", separators: ".,",
    font: { family: "Helvetica Neue, Helvetica, Arial, Liberation Sans, sans-serif", size: 12, color: INK },
    paper_bgcolor: "#fff", plot_bgcolor: "#fff", bargap: 0.28, dragmode: "zoom",
    hoverlabel: { bgcolor: "#fff", bordercolor: "#9aa5af", font: { color: INK, size: 12 }, align: "left", namelength: -1 },
    legend: { orientation: "h", traceorder: "normal", x: 0, y: 0, yref: "container", xanchor: "left", yanchor: "bottom", font: { size: 11.5 } },
    modebar: { bgcolor: "rgba(255,255,255,.85)", color: "#9aa5af", activecolor: "#1f5a8c" },
    xaxis: AXIS, yaxis: AXIS,
  };
  /* Listed explicitly: the default has a button that sends the data to plotly's server. */
  const CONFIG = { responsive: true, displaylogo: false, displayModeBar: true, showTips: false, plotlyServerURL: "",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };

  const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  function merged(base, more) {
    const all = { ...base };
    for (const [key, value] of Object.entries(more)) all[key] = isObject(value) && isObject(base[key]) ? merged(base[key], value) : value;
    return all;
  }

  function draw(plot, view, name) {
    const layout = merged(LAYOUT, view.layout);
    for (const axis of ["xaxis", "yaxis"]) layout[axis] = merged(AXIS, layout[axis]);
    const config = { ...CONFIG, toImageButtonOptions: { format: "svg", filename: name } };
    return Plotly.react(plot, structuredClone(view.traces), layout, config);
  }

  function prepare(place, chart) {
    const head = place.appendChild(document.createElement("div")), plot = place.appendChild(document.createElement("div"));
    head.className = "head";
    plot.className = "plot";
    if (place.dataset.title) head.append(place.dataset.title);
    const show = (number) => {
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
    place.draw = () => { show(0); delete place.draw; };
  }

  function drawCharts() {
    const charts = JSON.parse(document.getElementById("charts").textContent);
    const places = [...document.querySelectorAll(".chart")].filter((place) => place.dataset.chart in charts);
    const seen = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) if (isIntersecting && target.draw) target.draw();
    }, { rootMargin: "600px" });
    for (const place of places) {
      prepare(place, charts[place.dataset.chart]);
      seen.observe(place);
    }
    window.addEventListener("beforeprint", () => places.forEach((place) => place.draw?.()));
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

  function listContents() {
    const headings = [...document.querySelectorAll("main h2, main h3")], nav = document.getElementById("contents");
    if (headings.length < 3) return;
    const box = nav.appendChild(document.createElement("details")), list = document.createElement("ul"), links = new Map();
    box.appendChild(document.createElement("summary")).textContent = "Contents";
    box.open = window.matchMedia("(min-width: 1180px)").matches;
    for (const [number, heading] of headings.entries()) {
      heading.id ||= `part-${number + 1}`;
      const item = list.appendChild(document.createElement("li")), link = item.appendChild(document.createElement("a"));
      item.className = heading.tagName === "H3" && document.querySelector("main h2") ? "inner" : "";
      link.href = `#${heading.id}`;
      link.textContent = heading.textContent;
      link.addEventListener("click", () => { for (let place = heading.closest("details"); place; place = place.parentElement.closest("details")) place.open = true; });
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
  drawCharts();
  document.querySelectorAll("table:has(thead)").forEach(makeSortable);
  listContents();
})();
