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
    const low = Math.min(...numbers), high = Math.max(...numbers), log = low > 0 && high / low >= 50;
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
