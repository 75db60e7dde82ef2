// Plotly, which is loaded once a plot comes near the window; each plot is drawn again when what it shows has changed.
const drawn = { chosen: null, slots: new Map(), boxes: new Map() };
const plots = {};
let loading = null;

function plotly() {
  loading = loading || inflated("plotly").then((buffer) => {
    document.head.append(el("script", {}, decoded(buffer))); // the policy lets it run by its hash
  });
  return loading;
}

function plot(id, draw) {
  const host = at(id), own = { stale: true, near: false, busy: false };
  async function refresh() {
    if (!own.stale || !own.near || own.busy) return;
    own.busy = true;
    await plotly();
    own.stale = false;
    const made = draw();
    host.hidden = !made;
    if (made) {
      const first = !host.classList.contains("js-plotly-plot");
      await Plotly.react(host, made.traces, layout(made.layout), CONFIG(id));
      if (first) host.on("plotly_click", (event) => {
        const run = data.runs[event.points[0].customdata];
        if (run) openRun(run);
      });
      host.dataset.drawn = String(Number(host.dataset.drawn || 0) + 1);
    }
    own.busy = false;
    refresh();
  }
  plots[id] = () => { own.stale = true; refresh(); };
  new IntersectionObserver((entries) => {
    own.near = entries[entries.length - 1].isIntersecting;
    refresh();
  }, { rootMargin: "400px" }).observe(host.parentElement);
}

const CONFIG = (id) => ({
  displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  toImageButtonOptions: { format: "svg", filename: id.replace("-plot", "") },
});

function layout(given) {
  const axis = { gridcolor: colour("grid"), linecolor: colour("line"), zeroline: false, ticks: "", automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest", dragmode: "zoom",
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("quiet") },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text"), size: 13 }, align: "left", namelength: 0 },
    margin: { l: 64, r: 16, t: 12, b: 52 }, height: 400, ...given,
    xaxis: { ...axis, ...given.xaxis }, yaxis: { ...axis, ...given.yaxis },
  };
}

const heading = (text) => ({ text: plain(text), font: { size: 13 } });
const rgba = (hex, opacity) => `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${opacity})`;

// The groups in colour: those that were chosen, else the best eight of which the filter leaves a run.
function chooseGroups() {
  const shown = new Set(view.shown.map((run) => run.group));
  let wanted = drawn.chosen && [...drawn.chosen].filter((index) => shown.has(index));
  if (!wanted) {
    const ranked = data.groups.filter((group) => shown.has(group.index)).sort((a, b) =>
      isNumber(a.mean) !== isNumber(b.mean) ? (isNumber(a.mean) ? -1 : 1) : data.direction === "min" ? a.mean - b.mean : b.mean - a.mean);
    wanted = ranked.slice(0, COLOURS.light.length).map((group) => group.index);
  }
  for (const index of [...drawn.slots.keys()]) if (!wanted.includes(index)) drawn.slots.delete(index);
  for (const index of wanted) {
    if (drawn.slots.has(index)) continue;
    const taken = new Set(drawn.slots.values());
    drawn.slots.set(index, Array.from({ length: MOST_GROUPS }, (_, slot) => slot).find((slot) => !taken.has(slot)));
  }
  drawn.boxes.forEach(tick);
  at("best-groups").hidden = !drawn.chosen;
}

function tick(box, index) {
  const slot = drawn.slots.get(index);
  box.checked = slot !== undefined;
  box.style.accentColor = slot === undefined ? "" : slotColour(slot);
}

function drawnBox(group) {
  const box = el("input", { type: "checkbox", "aria-label": `Draw ${labelOf(group)}` });
  box.addEventListener("change", () => setDrawn(group.index, box.checked));
  drawn.boxes.set(group.index, box);
  tick(box, group.index);
  return box;
}

function setDrawn(index, on) {
  drawn.chosen = new Set(drawn.slots.keys());
  on ? drawn.chosen.add(index) : drawn.chosen.delete(index);
  if (drawn.chosen.size > MOST_GROUPS) drawn.chosen.delete(index);
  refreshPlots();
}

function refreshPlots() {
  chooseGroups();
  for (const refresh of Object.values(plots)) refresh();
}

// The groups in colour that are among `indices`, each with its line and its symbol, and a word for the others.
function legend(indices) {
  const items = [...drawn.slots].filter(([index]) => indices.has(index)).map(([index, slot]) => {
    const hex = slotColour(slot), line = svg("line", { x1: 0, x2: 30, y1: 6, y2: 6, stroke: hex, "stroke-width": 2.2, "stroke-dasharray": ["none", "6 4", "2 3"][Math.floor(slot / COLOURS.light.length)] });
    return el("li", {}, svg("svg", { viewBox: "0 0 30 12", "aria-hidden": "true" }, line, svg("path", { d: SHAPES[slot % SHAPES.length], transform: "translate(15 6)", fill: hex, stroke: hex, "stroke-width": 1.6 })), labelOf(data.groups[index]));
  });
  const rest = [...indices].filter((index) => !drawn.slots.has(index)).length;
  return rest ? [...items, el("li", { class: "quiet-text" }, "in grey: runs of other groups")] : items;
}

const STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12, 2.11, 2.101, 2.093, 2.086, 2.08, 2.074, 2.069, 2.064, 2.06, 2.056, 2.052, 2.048, 2.045, 2.042];
const student = (free) => STUDENT[free - 1] || 1.96 + 2.4 / free;

// Mean, lower and upper end at each step at which two or more of the curves are known; between its points a curve is straight.
function band(curves, way) {
  const steps = [...new Set(curves.flatMap(([xs]) => xs))].sort((a, b) => a - b), at = curves.map(() => 0);
  const rows = [];
  for (const step of steps) {
    const values = [];
    curves.forEach(([xs, ys], i) => {
      if (step < xs[0] || step > xs[xs.length - 1]) return;
      while (at[i] < xs.length - 1 && xs[at[i] + 1] <= step) at[i]++;
      const j = at[i], k = Math.min(j + 1, xs.length - 1), part = xs[k] > xs[j] ? (step - xs[j]) / (xs[k] - xs[j]) : 0;
      const value = part ? ys[j] + part * (ys[k] - ys[j]) : ys[j];
      if (isNumber(value)) values.push(value);
    });
    if (!values.length) continue;
    const n = values.length, mean = values.reduce((a, b) => a + b) / n;
    const half = n < 2 ? 0 : student(n - 1) * Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (n - 1) / n);
    rows.push({ step, n, mean, low: way === "range" ? Math.min(...values) : mean - half, high: way === "range" ? Math.max(...values) : mean + half });
  }
  return rows;
}

function groupTraces(group, slot, name, way) {
  const all = view.shown.filter((run) => run.group === group.index && run.curves && run.curves[name]), complete = all.filter((run) => run.state === "complete");
  const runs = complete.length ? complete : all; // what has ended early would bend the mean where it ends
  const rows = band(runs.map((run) => curve(run, name)), way), wide = rows.filter((row) => row.n > 1), hex = slotColour(slot);
  const says = (row) => `${plain(labelOf(group))}<br>step ${row.step.toLocaleString("en")}: ${figure(row.mean)}${row.n > 1 ? ` (${figure(row.low)} to ${figure(row.high)})` : ""}, ${counted(row.n, "run")}`;
  return [
    { x: [...wide, ...wide.slice().reverse()].map((row) => row.step), y: [...wide.map((row) => row.high), ...wide.slice().reverse().map((row) => row.low)], fill: "toself", fillcolor: rgba(hex, 0.16), line: { width: 0 }, mode: "lines", hoverinfo: "skip" },
    { x: rows.map((row) => row.step), y: rows.map((row) => row.mean), text: rows.map(says), hoverinfo: "text", mode: rows.length > 1 ? "lines" : "markers", line: { color: hex, width: 2, dash: DASHES[Math.floor(slot / COLOURS.light.length)] }, marker: { color: hex } },
  ];
}

const MOST_LINES = 100;

function runTraces(name) {
  const runs = view.ordered.filter((run) => run.curves && run.curves[name]);
  return runs.slice(0, MOST_LINES).map((run) => {
    const [x, y] = curve(run, name), slot = drawn.slots.get(run.group), hex = slot === undefined ? colour("faint") : slotColour(slot);
    return { x, y, customdata: x.map(() => run.index), text: x.map((step, i) => `${plain(run.name || "")} ${plain(folderOf(run))}<br>step ${step.toLocaleString("en")}: ${figure(y[i])}`), hoverinfo: "text", mode: x.length > 1 ? "lines" : "markers", line: { color: hex, width: 1.2, dash: slot === undefined ? "solid" : DASHES[Math.floor(slot / COLOURS.light.length)] } };
  });
}

// What lies beyond half of the longest curve's steps: where the differences are that the table of groups tells.
function lastHalf(traces) {
  const begin = traces.flatMap((trace) => trace.x).reduce((a, b) => Math.max(a, b), 0) / 2;
  return traces.map((trace) => {
    const kept = (list) => list && list.filter((_, i) => trace.x[i] >= begin);
    return { ...trace, x: kept(trace.x), y: kept(trace.y), text: kept(trace.text), customdata: kept(trace.customdata) };
  });
}

function drawCurves() {
  const name = at("curve").value, way = at("band").value, with_ = view.shown.filter((run) => run.curves && run.curves[name]).length;
  const groups = [...drawn.slots].map(([index, slot]) => [data.groups[index], slot]);
  at("curves-says").textContent = !with_ ? `None of the runs shown has a curve of ${name}.`
    : way === "runs" ? (with_ > MOST_LINES ? `The first ${MOST_LINES} of ${counted(with_, "run")}, in the order of the table of runs; filter it for others.` : `${counted(with_, "run")}. A click opens one.`)
    : `${groups.length < data.groups.length ? `${counted(groups.length, "group")} of ${data.groups.length.toLocaleString("en")}, ${drawn.chosen ? "as chosen in their table" : "the best"}; ` : ""}${counted(with_, "run has", "runs have")} this curve. A band needs two runs, and holds complete ones where there are any.`;
  at("legend").replaceChildren(...legend(new Set(with_ ? drawn.slots.keys() : [])));
  if (!with_) return null;
  const traces = way === "runs" ? runTraces(name) : groups.flatMap(([group, slot]) => groupTraces(group, slot, name, way));
  return {
    traces: at("curve-end").checked ? lastHalf(traces) : traces,
    layout: { xaxis: { title: heading("optimizer step") }, yaxis: { title: heading(name), type: at("curve-log").checked ? "log" : "linear" } },
  };
}

function startCurves() {
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.curves || {})))].sort();
  if (!names.length) {
    at("curves-says").textContent = "No run has a curve: metrics.csv is where they come from, and a run that failed early has none.";
    at("curves-tools").parentElement.hidden = true;
    return;
  }
  const bare = (name) => name.replace(/^(train|val|test)(id|idation)?[/_]/, ""), same = names.filter((name) => bare(name) === bare(data.metric));
  const first = same.find((name) => name.startsWith("val")) || same[0] || names[0];
  at("curve").append(...names.map((name) => el("option", { value: name, selected: name === first }, name)));
  if (!data.runs.some((run) => run.group !== null)) at("band").value = "runs";
  for (const id of ["curve", "band", "curve-log", "curve-end"]) at(id).addEventListener("change", () => plots["curves-plot"]());
  at("best-groups").addEventListener("click", () => { drawn.chosen = null; refreshPlots(); });
  plot("curves-plot", drawCurves);
}
// The metric against what a run costs, and against the factors of a sweep.
function onFront(runs, cost) {
  const front = [];
  const ordered = runs.slice().sort((a, b) => cost.of(a) - cost.of(b) || (better(metricOf(a), metricOf(b)) ? -1 : 1));
  for (const run of ordered) if (!front.length || better(metricOf(run), metricOf(front[front.length - 1]))) front.push(run);
  return front;
}

function costTraces(runs, cost) {
  const by = new Map();
  for (const run of runs) {
    const slot = drawn.slots.get(run.group);
    by.set(slot, [...(by.get(slot) || []), run]);
  }
  const ordered = [...by].sort(([a], [b]) => (a === undefined ? -1 : b === undefined ? 1 : a - b));
  return ordered.map(([slot, some]) => ({
    x: some.map(cost.of), y: some.map(metricOf), customdata: some.map((run) => run.index), mode: "markers", hoverinfo: "text",
    text: some.map((run) => `${plain(run.name || "")} ${plain(folderOf(run))}<br>${plain(data.groups[run.group] ? labelOf(data.groups[run.group]) : "")}<br>${plain(data.metric)} ${figure(metricOf(run))}, ${cost.text(cost.of(run))}`),
    marker: { color: slot === undefined ? colour("faint") : slotColour(slot), size: slot === undefined ? 6 : /triangle/.test(SYMBOLS[slot % SYMBOLS.length]) ? 11 : 9, symbol: slot === undefined ? "circle" : SYMBOLS[slot % SYMBOLS.length], opacity: slot === undefined ? 0.55 : 0.9, line: { width: 1, color: colour("card") } },
  }));
}

function drawCost() {
  const cost = COSTS.find((one) => one.key === at("axis").value);
  const known = view.shown.filter(scored), runs = known.filter((run) => isNumber(cost.of(run)));
  const left = [[view.shown.length - known.length, `no final ${data.metric}`], [known.length - runs.length, `no ${cost.title}`]].filter(([n]) => n).map(([n, what]) => `${counted(n, "run has", "runs have")} ${what}`);
  at("cost-says").textContent = `${counted(runs.length, "run")} drawn${left.length ? `; ${left.join(", ")}` : ""}.`;
  const front = onFront(runs, cost);
  at("cost-legend").replaceChildren(...(runs.length ? legend(new Set(runs.map((run) => run.group))) : []));
  at("front").replaceChildren(...(front.length ? [el("h3", {}, "On the front"), el("p", { class: "quiet-text" }, `No run is both cheaper and ${data.direction === "min" ? "lower" : "higher"} in ${data.metric}.`), frontTable(front, cost)] : []));
  if (!runs.length) return null;
  const line = { x: front.map(cost.of), y: front.map(metricOf), mode: "lines", line: { shape: "hv", color: colour("text"), width: 1.5, dash: "dot" }, hoverinfo: "skip" };
  const title = heading(cost.title), type = at("cost-log").checked ? "log" : "linear";
  return { traces: [line, ...costTraces(runs, cost)], layout: { xaxis: { title, type, tickformat: cost.key === "seconds" || cost.key === "latency_ms" ? "" : "~s" }, yaxis: { title: heading(data.metric) } } };
}

function frontTable(front, cost) {
  const few = front.slice(-12), text = aligned(few.map(metricOf));
  const rows = few.map((run) => el("tr", {}, el("td", {}, el("button", { type: "button", class: "open", on: { click: () => openRun(run) } }, folderOf(run))), el("td", { class: "number" }, cost.text(cost.of(run))), el("td", { class: "number" }, text(metricOf(run)))));
  return el("div", {}, el("table", { class: "small" }, el("tbody", {}, rows)), few.length < front.length ? el("p", { class: "quiet-text" }, `and ${counted(front.length - few.length, "cheaper run")}`) : null);
}

function startCost() {
  const known = COSTS.filter((cost) => data.runs.some((run) => isNumber(cost.of(run)) && scored(run)));
  const missing = COSTS.filter((cost) => !known.includes(cost)).map((cost) => cost.title);
  if (known.length && data.runs.length === 1) {
    at("cost-says").textContent = "One run: what it costs stands in the table of runs.";
    at("cost-tools").parentElement.hidden = true;
    return;
  }
  if (!known.length) {
    at("cost-says").textContent = `No complete run says what it costs (latency, bytes, MACs, seconds or parameters) beside ${data.metric}: receipts have the first three.`;
    at("cost-tools").parentElement.hidden = true;
    return;
  }
  at("axis").append(...known.map((cost) => el("option", { value: cost.key }, cost.title)));
  if (missing.length) at("cost-tools").append(el("span", { class: "quiet-text" }, `No run says its ${missing.join(", ")}.`));
  for (const id of ["axis", "cost-log"]) at(id).addEventListener("change", () => plots["cost-plot"]());
  plot("cost-plot", drawCost);
}

// A factor's axis: where a value lies between 0 and 1, and the words at its marks.
function axisOf(key) {
  const values = data.runs.map((run) => run.factors[key]).filter((value) => value !== undefined), numbers = values.filter(isNumber);
  if (numbers.length && numbers.length === values.length && new Set(numbers).size > 1) {
    const low = Math.min(...numbers), high = Math.max(...numbers), isRate = /(^|[._])(lr|learning_rate|rate)$/.test(key);
    const log = low > 0 && high / low >= (isRate ? 2 : 50);
    const place = log ? (value) => Math.log(value / low) / Math.log(high / low) : (value) => (value - low) / (high - low);
    const levels = [...new Set(numbers)].sort((a, b) => a - b), ends = levels.length <= 6 ? levels : [low, log ? Math.sqrt(low * high) : (low + high) / 2, high];
    return { place, log, ticks: ends.map((value) => [place(value), figure(value, 3)]) };
  }
  const levels = [...new Set(values.map(word))].sort((a, b) => a.localeCompare(b, "en", { numeric: true })), last = Math.max(1, levels.length - 1);
  const every = Math.ceil(levels.length / 12);
  return { place: (value) => levels.indexOf(word(value)) / last, log: false, ticks: levels.map((level, i) => [i / last, level]).filter((_, i) => i % every === 0) };
}

// viridis, from Smith and van der Walt: even in lightness, and readable without colour
const SCALE = ["#440154", "#482475", "#414487", "#355f8d", "#2a788e", "#21918c", "#22a884", "#44bf70", "#7ad151", "#bddf26"];

function sweepTraces(axes, runs, low, high) {
  const bins = SCALE.map(() => []), scale = theme() === "dark" ? SCALE.slice(2) : SCALE.slice(0, 9).reverse(); // the best stand out
  for (const run of runs) {
    const part = high > low ? (metricOf(run) - low) / (high - low) : 1, good = data.direction === "min" ? 1 - part : part;
    bins[Math.min(scale.length - 1, Math.floor(good * scale.length))].push(run);
  }
  return scale.map((hex, bin) => {
    const x = [], y = [], text = [], customdata = [];
    for (const run of bins[bin]) {
      axes.forEach(({ key, axis }, i) => {
        const value = key === null ? metricOf(run) : run.factors[key];
        x.push(i);
        y.push(value === undefined ? null : axis.place(value));
        customdata.push(run.index);
        text.push(`${plain(folderOf(run))}<br>${plain(key || data.metric)} = ${plain(key === null ? figure(value) : word(value))}<br>${plain(data.metric)} ${figure(metricOf(run))}`);
      });
      x.push(null); y.push(null); text.push(""); customdata.push(null);
    }
    return { x, y, text, customdata, hoverinfo: "text", mode: "lines+markers", marker: { size: 4, color: hex }, line: { color: hex, width: 1.3 }, opacity: Math.max(0.25, Math.min(0.9, 12 / Math.sqrt(runs.length + 1) * (0.4 + 0.6 * (bin + 1) / scale.length))) };
  });
}

function drawSweep() {
  const keys = sweepKeys(), runs = view.shown.filter(scored), left = view.shown.length - runs.length, more = differing().length - keys.length;
  at("sweep-says").textContent = `${counted(runs.length, "run")} with a final ${data.metric}${left ? `, ${counted(left, "run")} without` : ""}; ${theme() === "dark" ? "lighter" : "darker"} lines are better. A click opens a run.${more ? ` ${counted(more, "factor")} that ${more === 1 ? "matters" : "matter"} less ${more === 1 ? "has" : "have"} no axis.` : ""}`;
  if (!runs.length) return null;
  const all = data.runs.filter(scored).map(metricOf), low = Math.min(...all), high = Math.max(...all);
  const own = { place: (value) => (high > low ? (value - low) / (high - low) : 0.5), log: false, ticks: high > low ? [low, (low + high) / 2, high].map((value) => [own_place(value, low, high), figure(value, 3)]) : [[0.5, figure(low)]] };
  const axes = [...keys.map((key) => ({ key, axis: axisOf(key) })), { key: null, axis: own }], last = axes.length - 1;
  const line = { color: colour("quiet"), width: 1 };
  const names = axes.map(({ key, axis }, i) => ({ x: i, y: 1.07, xref: "x", yref: "y", text: plain(clipped(key === null ? data.metric : short(key))) + (axis.log ? " (log)" : ""), showarrow: false, yanchor: "bottom", font: { color: colour("text"), size: 13, weight: 600 }, hovertext: plain(key || data.metric) }));
  const ticks = axes.flatMap(({ axis }, i) => axis.ticks.map(([y, text]) => ({ x: i, y, xref: "x", yref: "y", text: plain(clipped(text)), showarrow: false, xanchor: i === last ? "left" : "right", xshift: i === last ? 7 : -7, bgcolor: colour("veil"), borderpad: 1, font: { size: 11.5 } })));
  return {
    traces: sweepTraces(axes, runs, low, high),
    layout: {
      height: 420, margin: { l: 24, r: 64, t: 8, b: 16 }, annotations: [...names, ...ticks], shapes: axes.map((_, i) => ({ type: "line", x0: i, x1: i, y0: 0, y1: 1, line })),
      xaxis: { visible: false, range: [-0.45, last + 0.25], fixedrange: true }, yaxis: { visible: false, range: [-0.06, 1.18], fixedrange: true },
    },
  };
}

const own_place = (value, low, high) => (value - low) / (high - low);
const clipped = (text) => (text.length > 18 ? text.slice(0, 17) + "…" : text);
const MOST_AXES = 10;

const differing = () => data.factors.filter((key) => new Set(data.runs.filter((run) => key in run.factors).map((run) => word(run.factors[key]))).size > 1);

// The factors with an axis: of those that differ between runs, those that matter most first where that is known.
function sweepKeys() {
  const differ = differing();
  const share = new Map((data.importance.rows || []).map((row) => [row.factor, row.share]));
  return differ.sort((a, b) => (share.get(b) || 0) - (share.get(a) || 0)).slice(0, MOST_AXES);
}

function importanceBars() {
  const { rows, why, n, cut } = data.importance;
  const head = el("h3", {}, "Importance of the factors");
  if (why) return [head, el("p", { class: "empty" }, why)];
  const bars = rows.map((row) => {
    const fill = el("i"), way = row.direction === null ? "" : row.direction > 0 ? "↑" : "↓";
    fill.style.width = `${100 * row.share}%`;
    return el("li", { title: row.factor }, el("span", {}, short(row.factor)), el("div", { class: "track" }, fill), el("span", { class: "number" }, `${Math.round(100 * row.share)} %`), el("span", { class: "way", title: row.direction === null ? false : `rank correlation ${figure(row.direction, 2)}` }, way));
  });
  return [head, el("ol", { class: "bars" }, bars), el("p", { class: "quiet-text" }, `Share of the variance of the runs' ranks in ${data.metric} that each factor explains alone (ε² of Kruskal and Wallis), of ${counted(n, "complete run")}${cut ? `; numbers of more than ${cut} values are cut into ${cut} parts of about equal size` : ""}. An arrow says which way ${data.metric} goes as a number grows (rank correlation beyond ±0.3). Interactions aren't told apart, and where a search chose the values, factors may move together.`)];
}

function startSweep() {
  const differ = sweepKeys();
  if (!differ.length) {
    at("sweep-says").textContent = data.runs.length === 1 ? "One run: no factor differs." : "No factor differs between these runs.";
    at("sweep-card").hidden = true;
    return;
  }
  at("importance").append(...importanceBars());
  plot("sweep-plot", drawSweep);
}
