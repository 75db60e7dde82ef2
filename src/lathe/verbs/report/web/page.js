// Brings the parts together.
const tables = {};

function head() {
  const states = STATES.filter((state) => data.counts[state]).map((state) => el("span", {}, stateDot(state), `${data.counts[state].toLocaleString("en")} ${state}`));
  const total = Object.values(data.counts).reduce((a, b) => a + b, 0);
  at("facts").append(el("span", {}, counted(total, "run")), ...states, el("span", {}, `${data.metric}, ${data.direction === "min" ? "lower" : "higher"} is better`), el("span", {}, String(data.created).replace("T", " ").slice(0, 16)), el("span", {}, `Lathe ${data.lathe}`));
  at("marks").hidden = !data.marks.length;
  at("marks").append(...data.marks.map((mark) => el("li", {}, mark)));
  at("footer").textContent = `Made by Lathe ${data.lathe} at ${data.created}. This file holds all that it shows and loads nothing. ${data.thinned || ""}`;
}

function startGroups() {
  const unequal = data.groups.filter((group) => !group.interval).length, whys = [...new Set(data.groups.filter((group) => group.interval && group.why).map((group) => group.why))];
  at("groups-says").textContent = !data.groups.length ? "No group: no run is complete."
    : data.runs.length === 1 ? "One run: there is nothing to compare yet. Other seeds give an interval, other settings a second group."
    : `${counted(data.groups.length, "group")} of runs that differ in nothing but their seed and fold, over complete runs. The table of runs has all states.${unequal === data.groups.length ? " None has an interval." : ""}${whys.length ? ` ${whys.slice(0, 3).join("; ")}.` : ""}`;
  const columns = groupColumns(), place = columns.findIndex((column) => column.main);
  tables.groups = sortable(at("groups-table"), columns, "Groups", { index: place, down: data.direction !== "min" });
  at("pairs").hidden = !data.pairs.length;
  if (!data.pairs.length) return;
  at("pairs-says").textContent = `${data.metric} of each group minus that of ${labelOf(data.groups[data.pairs[0].b])}, over the seeds and folds that both have.`;
  const told = pairColumns();
  sortable(at("pairs-table"), told, "Differences from the baseline", { index: told.findIndex((column) => column.main), down: data.direction !== "min" }).show(data.pairs);
}

function startRuns() {
  const columns = runColumns(), place = columns.findIndex((column) => column.title === data.metric);
  tables.runs = sortable(at("runs-table"), columns, "Runs", { index: place, down: data.direction !== "min" });
  tables.runs.sorted = (ordered) => {
    view.ordered = ordered;
    if (at("band").value === "runs" && plots["curves-plot"]) plots["curves-plot"]();
  };
}

function showTables() {
  const hidden = data.runs.length - view.shown.length, kept = new Set(view.shown.map((run) => run.group));
  tables.runs.show(view.shown, "The filter leaves no run: clear it, or show more states.");
  at("runs-says").textContent = `${counted(view.shown.length, "run")}${hidden ? `; the filter hides ${hidden.toLocaleString("en")}` : ""}. A name opens its run with all it has measured; ↑ and ↓ go from row to row.`;
  const groups = data.groups.filter((group) => kept.has(group.index) || !group.runs.length);
  tables.groups.show(groups, data.groups.length ? "The filter leaves no run of any group." : "There is no complete run to group.");
}

function startTheme() {
  const root = document.documentElement, names = { "": "◐ system", light: "☀ light", dark: "☾ dark" };
  const kept = (act) => { try { return act(localStorage); } catch { return null; } }; // a browser may refuse files a memory
  function set(name) {
    name ? (root.dataset.theme = name) : delete root.dataset.theme;
    at("theme").textContent = names[name];
    kept((memory) => (name ? memory.setItem("lathe-theme", name) : memory.removeItem("lathe-theme")));
    if (data) refreshPlots();
  }
  const saved = kept((memory) => memory.getItem("lathe-theme"));
  set(saved in names ? saved : "");
  at("theme").addEventListener("click", () => set({ "": theme() === "dark" ? "light" : "dark", light: dark.matches ? "" : "dark", dark: dark.matches ? "light" : "" }[root.dataset.theme || ""]));
  dark.addEventListener("change", () => data && refreshPlots());
}

async function start() {
  startTheme();
  if (typeof DecompressionStream === "undefined") return say("This browser is too old for the page: it needs Chrome or Edge 123, Firefox 120, Safari 17.5 or later.");
  await open();
  head();
  startFilter();
  startGroups();
  startRuns();
  startDrawer();
  let waiting = 0;
  view.listeners.push(showTables, () => { // the tables first: plots take longer
    clearTimeout(waiting);
    waiting = setTimeout(refreshPlots, 100);
  });
  startCurves();
  startCost();
  startSweep();
  at("bar").hidden = at("main").hidden = false;
  applyFilter();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

function say(sentence) {
  at("failed").hidden = false;
  at("failed").textContent = sentence;
}

start().catch((error) => {
  say(`The page can't be drawn: ${error.message}`);
  throw error;
});
