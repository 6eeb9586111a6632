"use strict";
/* Keep the list of runs and the page of a run up to date, filter the list, and choose runs to compare. */
(() => {
  const LIST_MS = 5000, LEAST_MS = 2000, MOST_MS = 60000;

  async function answer(path) {
    const got = await fetch(path, { headers: { accept: "application/json" } });
    if (!got.ok) throw new Error(`${path}: ${got.status}`);
    return got.json();
  }
  /* Ask again and again; a slow or failing server is queried less often, and a hidden page sends nothing. */
  function repeat(ask, usual) {
    let wait = usual;
    const turn = async () => {
      const began = performance.now();
      let goesOn = true;
      if (!document.hidden) {
        try {
          goesOn = await ask();
          wait = Math.min(MOST_MS, Math.max(usual, 10 * (performance.now() - began)));
        } catch { wait = Math.min(MOST_MS, 2 * wait); }
      }
      if (goesOn) setTimeout(turn, wait);
    };
    setTimeout(turn, usual);
  }
  function setState(place, text, style) {
    place.textContent = text;
    place.className = `state ${style}`;
  }

  function followList(table) {
    const rows = new Map([...table.tBodies[0].rows].map((row) => [row.dataset.run, row]));
    repeat(async () => {
      const states = await answer("/states");
      for (const [id, [text, style]] of Object.entries(states)) {
        const row = rows.get(id);
        if (row) setState(row.querySelector(".state"), text, style);
      }
      const isNew = !("partial" in table.dataset) && Object.keys(states).some((id) => !rows.has(id));
      document.getElementById("changed").hidden = !isNew;
      return true;
    }, LIST_MS);
  }
  function filterList(table) {
    const words = document.getElementById("filter");
    words.addEventListener("input", () => {
      const all = words.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of table.tBodies[0].rows) row.hidden = !all.every((word) => row.textContent.toLowerCase().includes(word));
    });
    words.addEventListener("keydown", (event) => { if (event.key === "Enter") event.preventDefault(); });
  }
  function chooseRuns(table) {
    const button = document.getElementById("compare"), text = document.getElementById("chosen"), most = Number(table.dataset.most);
    const count = () => {
      const number = table.querySelectorAll("input:checked").length;
      button.disabled = number < 2 || number > most;
      text.textContent = number < 2 ? "tick 2 or more runs" : number > most ? `at most ${most} runs` : `${number} runs`;
    };
    table.addEventListener("change", count);
    window.addEventListener("pageshow", count);
    count();
  }

  const added = (parent, name, text = "", style = "") => {
    const one = parent.appendChild(document.createElement(name));
    one.textContent = text;
    one.className = style;
    return one;
  };
  function showTrials(place, trials) {
    place.replaceChildren();
    for (const { name, state, facts, warnings } of trials) {
      const heading = added(place, "h2", `${name} `), body = added(added(place, "table", "", "pairs"), "tbody");
      added(heading, "span", state, "soft");
      for (const [title, value] of [...facts, ...warnings.map((warning) => ["warning", warning])]) {
        const row = added(body, "tr");
        added(row, "td", title);
        added(row, "td", value, title === "warning" ? "warning" : "");
      }
    }
  }
  function followRun(place) {
    const charts = document.getElementById("live-charts");
    repeat(async () => {
      const now = await answer(place.dataset.live);
      setState(document.getElementById("run-state"), now.run_state, now.style);
      showTrials(place, now.trials);
      for (const [name, title] of Object.entries(now.titles)) {
        if (charts.querySelector(`[data-chart="${CSS.escape(name)}"]`)) continue;
        const chart = added(charts, "div", "", "chart");
        chart.dataset.chart = name;
        chart.dataset.title = title;
      }
      document.getElementById("no-charts").hidden = Object.keys(now.titles).length > 0;
      window.runstop.showCharts(now.charts);
      return !now.is_over || now.style === "active";
    }, LEAST_MS);
  }

  const table = document.getElementById("runs"), trials = document.getElementById("trials");
  if (table) { followList(table); filterList(table); chooseRuns(table); }
  if (trials?.dataset.live) followRun(trials);
})();
