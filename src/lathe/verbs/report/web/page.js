// What all parts use: the data, elements, numbers as text, colours. Names and texts of runs are a stranger's: they reach
// the page as text nodes alone, and Plotly, which reads some tags, through plain().
const NONE = "–";
const STATES = ["complete", "pruned", "running", "unfinished", "failed", "gone"];
const at = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else if (name === "class") made.className = value;
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

async function inflated(id) {
  const packed = at(id).textContent;
  at(id).remove();
  const bytes = Uint8Array.fromBase64 ? Uint8Array.fromBase64(packed) : Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

const decoded = (buffer) => new TextDecoder().decode(buffer);
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const counted = (n, one, more = one + "s") => `${n.toLocaleString("en")} ${n === 1 ? one : more}`;
// The last part of a key that says something: of model.net._target_ net.
const short = (key) => key.replace(/\._target_$/, "").split(".").pop();

function figure(value, digits = 4) {
  if (value === null || value === undefined) return NONE;
  if (!isNumber(value)) return word(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(Math.max(0, digits - 2)).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

// A column's numbers with as many decimals each, so that they stand below each other: four digits of the middle one.
function aligned(values) {
  const sizes = values.filter((value) => isNumber(value) && value !== 0).map(Math.abs).sort((a, b) => a - b), middle = sizes[Math.floor(sizes.length / 2)];
  if (!sizes.length || sizes.every(Number.isInteger) || middle < 1e-3 || middle >= 1e6) return figure;
  const most = Math.max(0, 3 - Math.floor(Math.log10(middle))), used = (value) => (String(Number(value.toFixed(most))).split(".")[1] || "").length;
  const places = sizes.reduce((some, value) => Math.max(some, used(value)), 0); // none that are zero in all
  return (value) => (isNumber(value) && (value === 0 || Math.abs(value) >= 10 ** -places) && Math.abs(value) < 1e6 ? value.toFixed(places) : figure(value));
}

// A value of a configuration, as it is typed.
function word(value) {
  if (value === null || value === undefined) return "null";
  if (isNumber(value)) return String(value);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

// The same in a table: numbers that a search has drawn have digits that nobody reads.
const brief = (value) => (isNumber(value) ? String(Number(value.toPrecision(5))) : word(value));

function decimals(spread, value) {
  const size = Math.abs(spread || value || 1);
  return Math.min(6, Math.max(0, (spread ? 1 : 3) - Math.floor(Math.log10(size))));
}

// Two digits of the middle group's deviation, so that the numbers of all groups stand below each other.
function places() {
  if (data.places === undefined) {
    const known = data.groups.filter((group) => isNumber(group.mean)), spreads = known.map((group) => group.std).filter(isNumber).sort((a, b) => a - b);
    data.places = decimals(spreads[Math.floor(spreads.length / 2)], known.length ? known[0].mean : 1);
  }
  return data.places;
}

function plusMinus(mean, std) {
  return isNumber(mean) ? mean.toFixed(places()) + (isNumber(std) ? ` ± ${std.toFixed(places())}` : "") : NONE;
}

const between = (interval) => `${interval[0].toFixed(places())} to ${interval[1].toFixed(places())}`;

function scaled(value, units, step = 1000) {
  if (!isNumber(value)) return figure(value);
  let at = 0;
  while (Math.abs(value) >= step && at < units.length - 1) [value, at] = [value / step, at + 1];
  return `${Number(value.toPrecision(3))}${units[at] ? " " + units[at] : ""}`;
}

const count = (value) => scaled(value, ["", "k", "M", "G", "T", "P"]);
const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB"]);

function duration(seconds) {
  if (!isNumber(seconds)) return figure(seconds);
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60), pad = (value) => String(value).padStart(2, "0");
  return minutes < 60 ? `${minutes} min ${pad(whole % 60)} s` : `${Math.floor(minutes / 60)} h ${pad(minutes % 60)} min`;
}

const COSTS = [
  { key: "latency_ms", title: "latency (ms)", of: (run) => run.cost.latency_ms, text: (value) => `${figure(value, 3)} ms` },
  { key: "bytes", title: "size of the file (bytes)", of: (run) => run.cost.bytes, text: bytes },
  { key: "macs", title: "MACs", of: (run) => run.cost.macs, text: count },
  { key: "seconds", title: "training time (s)", of: (run) => run.seconds, text: duration },
  { key: "parameters", title: "parameters", of: (run) => run.parameters, text: count },
];

// The series' colours of the style sheet, with a dash and a symbol each, so that colour is not the only difference.
const pairs = Array.from({ length: 8 }, (_, i) => getComputedStyle(document.documentElement).getPropertyValue(`--series-${i + 1}`).match(/#\w+/g));
const COLOURS = { light: pairs.map((pair) => pair[0]), dark: pairs.map((pair) => pair[1]) };
const DASHES = ["solid", "dash", "dot"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star"];
// the same symbols for the legend, around 0 0
const SHAPES = ["M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0", "M-3.6-3.6h7.2v7.2h-7.2z", "M0-5L5 0L0 5L-5 0z", "M0-4.5L4.5 3.5h-9z", "M0 4.5L4.5-3.5h-9z", "M0-4.5V4.5M-4.5 0H4.5", "M-3.5-3.5L3.5 3.5M-3.5 3.5L3.5-3.5", "M0-5L1.2-1.6H4.8L1.9.6L3 4L0 1.9L-3 4L-1.9.6L-4.8-1.6H-1.2z"];
const MOST_GROUPS = COLOURS.light.length * DASHES.length;
const dark = matchMedia("(prefers-color-scheme: dark)");

const theme = () => document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
const slotColour = (slot) => COLOURS[theme()][slot % COLOURS.light.length];

// The colour that a variable of the style sheet has now.
function colour(name) {
  const probe = at("title");
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color;
  probe.style.color = "";
  return found;
}

let data;

async function open() {
  data = JSON.parse(decoded(await inflated("data")));
  data.runs.forEach((run, index) => Object.assign(run, { index, cost: run.cost || {}, metrics: run.metrics || {}, factors: run.factors || {} }));
  data.groups.forEach((group, index) => Object.assign(group, { index, runs: [] }));
  for (const run of data.runs) if (data.groups[run.group]) data.groups[run.group].runs.push(run);
}

// A group in few words: the last parts of its keys, where no two of them are the same.
function labelOf(group) {
  const keys = Object.keys(group.factors || {}), names = keys.map(short);
  if (!keys.length || new Set(names).size < names.length) return group.label || "all runs";
  return keys.map((key, i) => `${names[i]}=${brief(group.factors[key])}`).join(", ");
}

const metricOf = (run) => run.metrics[data.metric];
const scored = (run) => run.state === "complete" && isNumber(metricOf(run));
const confidence = () => `${Math.round(1000 * (data.confidence || 0.95)) / 10} % interval`;
const better = (a, b) => (data.direction === "min" ? a < b : a > b);

// Steps and values of a curve; a value that is no number is NaN.
function curve(run, name) {
  const kept = run.curves && run.curves[name];
  return kept ? [data.steps[kept[0]], kept[1].map((value) => (value === null ? NaN : value))] : null;
}
// Which runs are shown: words that all occur, comparisons such as lr<0.01, and the states.
const view = { text: "", states: new Set(STATES), shown: [], ordered: [], listeners: [] };
const COMPARE = {
  "=": (a, b) => a === b, "!=": (a, b) => a !== b, "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b,
};

function fields(run) {
  return {
    state: run.state, name: run.name, path: run.path, seed: run.seed, fold: run.fold, seconds: run.seconds, parameters: run.parameters,
    group: run.group === null || !data.groups[run.group] ? null : data.groups[run.group].label, ...run.cost, ...run.metrics, ...run.factors,
  };
}

function haystack(run) {
  if (!run.words) {
    const factors = Object.entries(run.factors).map(([key, value]) => `${key}=${word(value)}`);
    run.words = [run.name, run.path, run.state, fields(run).group, ...factors].join("\n").toLowerCase();
  }
  return run.words;
}

// The names that `key` means: itself, or those that end with it after a dot or a slash.
function meant(key, names) {
  return names.has(key) ? [key] : [...names].filter((name) => name.endsWith("." + key) || name.endsWith("/" + key));
}

// A function of a run, and a sentence where a name is no column.
function reading(text) {
  const names = new Set(data.runs.flatMap((run) => Object.keys(fields(run)))), tests = [], unknown = [];
  for (const part of text.trim().split(/\s+/).filter(Boolean)) {
    const found = /^([\w./-]+?)(!=|<=|>=|=|<|>)(.+)$/.exec(part);
    if (!found) {
      const low = part.toLowerCase();
      tests.push((run) => haystack(run).includes(low));
      continue;
    }
    const [, key, sign, typed] = found, keys = meant(key, names), number = Number(typed);
    if (!keys.length) unknown.push(`Nothing is called ${key}.`);
    else tests.push((run) => {
      const own = fields(run);
      return keys.some((name) => {
        const value = own[name];
        if (value === null || value === undefined) return typed === "null" && sign === "=";
        if (isNumber(value) && !Number.isNaN(number)) return COMPARE[sign](value, number);
        return (sign === "=" || sign === "!=") && COMPARE[sign](word(value).toLowerCase(), typed.toLowerCase());
      });
    });
  }
  return { keeps: (run) => tests.every((test) => test(run)), says: unknown.join(" ") };
}

function applyFilter() {
  const { keeps, says } = reading(view.text);
  view.shown = data.runs.filter((run) => view.states.has(run.state) && keeps(run));
  const all = data.runs.length, few = view.shown.length < all;
  at("filter-says").textContent = [says, few ? `${view.shown.length.toLocaleString("en")} of ${counted(all, "run")}` : counted(all, "run")].filter(Boolean).join(" ");
  at("filter-says").className = says ? "bad" : few ? "few" : "";
  for (const listener of view.listeners) listener();
}

function startFilter() {
  let waiting = 0;
  at("filter").addEventListener("input", () => {
    const act = () => { view.text = at("filter").value; applyFilter(); };
    clearTimeout(waiting);
    if (data.runs.length > 200) waiting = setTimeout(act, 80); // one typed letter should not wait for the one before
    else act();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) {
      event.preventDefault();
      at("filter").focus();
    }
  });
  const present = STATES.filter((state) => data.runs.some((run) => run.state === state));
  at("states").append(...(present.length < 2 ? [] : present).map((state) => {
    const number = data.runs.filter((run) => run.state === state).length;
    const chip = el("button", { type: "button", class: "chip", "aria-pressed": "true", title: `Show or hide ${state} runs` }, stateDot(state), `${state} ${number.toLocaleString("en")}`);
    chip.addEventListener("click", () => {
      view.states.has(state) ? view.states.delete(state) : view.states.add(state);
      chip.setAttribute("aria-pressed", String(view.states.has(state)));
      applyFilter();
    });
    return chip;
  }));
}

const MARKS = { complete: "●", pruned: "◐", running: "▶", unfinished: "○", failed: "✕", gone: "∅" };
const stateDot = (state) => el("span", { class: `dot ${state}`, "aria-hidden": "true" }, MARKS[state] || "?");
const AT_ONCE = 150; // rows; of a thousand, layout takes longer than a reader waits

// A table that sorts by its heads, and shows further rows as one scrolls to them or asks for them. A column: title, help, of(row) to sort by, cell(row) to show, and whether it is a number.
function sortable(host, columns, caption, begin) {
  const made = new Map(), order = { ...begin };
  const heads = columns.map((column, index) => {
    const button = el("button", { type: "button", title: column.help || false, on: { click: () => by(index) } }, column.title, el("span", { class: "arrow", "aria-hidden": "true" }));
    return el("th", { scope: "col", class: column.number ? "number" : "" }, column.of ? button : el("span", { class: column.class === "box" ? "unseen" : "head-text" }, column.title));
  });
  const body = el("tbody"), empty = el("p", { class: "empty", hidden: true });
  const table = el("table", {}, el("caption", { class: "unseen" }, caption), el("thead", {}, el("tr", {}, heads)), body);
  const more = el("button", { type: "button", class: "more", hidden: true, on: { click: () => grow(ordered.length) } });
  let rows = [], ordered = [], shown = 0;

  function by(index) {
    const wanted = columns[index], up = wanted.number && !wanted.ascending;
    Object.assign(order, order.index === index ? { down: !order.down } : { index, down: Boolean(up) });
    show(rows);
  }

  function sorted(given) {
    const column = columns[order.index];
    if (!column) return given;
    const sign = order.down ? -1 : 1;
    const missing = (value) => value === null || value === undefined || Number.isNaN(value);
    return given.map((row) => [column.of(row), row]).sort(([a], [b]) => {
      if (missing(a) || missing(b)) return missing(a) - missing(b);
      if (isNumber(a) !== isNumber(b)) return isNumber(a) ? -1 : 1;
      return sign * (isNumber(a) ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    }).map(([, row]) => row);
  }

  function element(row) {
    if (!made.has(row)) made.set(row, el("tr", { "data-index": row.index }, columns.map((column) => el("td", { class: (column.number ? "number " : "") + (column.class || "") }, column.cell(row)))));
    return made.get(row);
  }

  function show(given, without = "") {
    rows = given;
    ordered = sorted(given);
    shown = 0;
    heads.forEach((head, index) => head.setAttribute("aria-sort", index !== order.index ? "none" : order.down ? "descending" : "ascending"));
    body.replaceChildren();
    grow(AT_ONCE);
    empty.hidden = Boolean(ordered.length);
    empty.textContent = without;
    if (api.sorted) api.sorted(ordered);
  }

  function grow(by) {
    body.append(...ordered.slice(shown, shown + by).map(element));
    shown = Math.min(ordered.length, shown + by);
    more.hidden = shown === ordered.length;
    more.textContent = `${shown.toLocaleString("en")} of ${ordered.length.toLocaleString("en")} rows are here: show all`;
  }

  host.addEventListener("scroll", () => {
    if (shown < ordered.length && host.scrollTop + 2 * host.clientHeight > host.scrollHeight) grow(AT_ONCE);
  }, { passive: true });

  // Up and down go from row to row.
  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr"), next = event.key === "ArrowDown" ? row.nextSibling : event.key === "ArrowUp" ? row.previousSibling : null;
    if (!next) return;
    event.preventDefault();
    next.querySelector("button").focus();
  });
  host.append(table, more, empty);
  const api = { show, element, sorted: null };
  return api;
}

function factorColumns() {
  return data.factors.map((key) => {
    const number = data.runs.every((run) => run.factors[key] === undefined || isNumber(run.factors[key]));
    const cell = (run) => (key in run.factors ? el("span", { title: word(run.factors[key]) }, brief(run.factors[key])) : NONE);
    return { title: short(key), help: key, number, ascending: true, of: (run) => sortValue(run.factors[key]), cell, class: "factor" };
  });
}

const sortValue = (value) => (value === undefined || value === null || isNumber(value) ? value : word(value));

// Mean and interval of each group on one axis: what the numbers say, at a glance.
function forest(group, low, high) {
  const x = (value) => (4 + 132 * (high > low ? (value - low) / (high - low) : 0.5)).toFixed(1);
  const drawn = svg("svg", { viewBox: "0 0 140 16", class: "forest", "aria-hidden": "true" }, svg("line", { x1: 4, x2: 136, y1: 8, y2: 8, class: "axis" }));
  if (group.interval) drawn.append(svg("line", { x1: x(group.interval[0]), x2: x(group.interval[1]), y1: 8, y2: 8, class: "range" }));
  if (isNumber(group.mean)) drawn.append(svg("circle", { cx: x(group.mean), cy: 8, r: 3.5 }));
  return drawn;
}

function groupColumns() {
  const ends = data.groups.flatMap((group) => [group.mean, ...(group.interval || [])]).filter(isNumber);
  const low = Math.min(...ends), high = Math.max(...ends);
  const best = aligned(data.groups.map((group) => group.best));
  return [
    { title: "Drawn", cell: drawnBox, class: "box" },
    { title: "Group", of: (group) => group.label, cell: groupCell, class: "name" },
    { title: "n", help: "complete runs", number: true, of: (group) => group.n, cell: (group) => figure(group.n) },
    { title: `${data.metric}, mean ± sd`, help: "mean and standard deviation of complete runs", main: true, number: true, ascending: data.direction === "min", of: (group) => group.mean, cell: (group) => el("strong", {}, plusMinus(group.mean, group.std)) },
    { title: confidence(), help: "of the mean", of: (group) => (group.interval ? group.interval[1] - group.interval[0] : null), cell: (group) => intervalCell(group, low, high), class: "interval" },
    { title: "best", number: true, ascending: data.direction === "min", of: (group) => group.best, cell: (group) => best(group.best) },
    { title: "time", help: "mean training time of a run", number: true, ascending: true, of: (group) => group.seconds, cell: (group) => duration(group.seconds) },
    { title: "parameters", number: true, ascending: true, of: (group) => group.parameters, cell: (group) => count(group.parameters) },
  ];
}

const signed = (value) => (isNumber(value) ? value.toFixed(places()).replace(/^(-?)(0\.?0*)$/, "$2").replace(/^(?=[0-9]*\.?[0-9]*[1-9])/, "+") : NONE);

const chance = (p) => (isNumber(p) && p < 0.001 ? "< 0.001" : figure(p, 2));

function pairColumns() {
  const group = (pair) => data.groups[pair.a] || {};
  return [
    { title: "Group", of: (pair) => group(pair).label, cell: (pair) => groupCell(group(pair)), class: "name" },
    { title: "pairs", help: "seeds and folds that both have", number: true, of: (pair) => pair.n, cell: (pair) => figure(pair.n) },
    { title: "difference", number: true, ascending: data.direction === "min", of: (pair) => pair.difference, cell: (pair) => el("strong", {}, signed(pair.difference)), main: true },
    { title: confidence(), of: (pair) => (pair.interval ? pair.interval[1] - pair.interval[0] : null), cell: (pair) => (pair.interval ? `${signed(pair.interval[0])} to ${signed(pair.interval[1])}` : NONE) },
    { title: "p", number: true, ascending: true, of: (pair) => pair.p, cell: (pair) => chance(pair.p) },
    ...(data.pairs.filter((pair) => isNumber(pair.p)).length < 2 ? [] : [["p (Holm)", "p_holm"], ["p (BH)", "p_bh"]]).map(([title, key]) => (
      { title, help: "corrected for all comparisons of this table", number: true, ascending: true, of: (pair) => pair[key], cell: (pair) => chance(pair[key]) })),
    { title: "What it says", cell: (pair) => pair.says, class: "says-cell" },
  ];
}

function intervalCell(group, low, high) {
  const said = group.interval ? between(group.interval) : group.why || "no interval"; // the head tells the why of others
  return el("div", {}, isNumber(group.mean) ? forest(group, low, high) : null, el("span", { class: "quiet-text" }, said));
}

function isBest(group) {
  const known = data.groups.filter((other) => isNumber(other.mean));
  return known.length > 1 && isNumber(group.mean) && !known.some((other) => better(other.mean, group.mean));
}

function groupCell(group) {
  const marks = (group.marks || []).map((mark) => el("span", { class: "mark", title: mark }, "⚠ ", el("span", { class: "unseen" }, mark)));
  const best = isBest(group) ? el("span", { class: "best", title: "best mean" }, " ★", el("span", { class: "unseen" }, "best mean")) : null;
  return el("div", {}, el("button", { type: "button", class: "open", title: group.label || false, on: { click: () => openGroup(group) } }, labelOf(group)), best, ...marks);
}

function runColumns() {
  const has = (of) => data.runs.some((run) => of(run) !== null && of(run) !== undefined);
  const numbers = [
    { title: "seed", of: (run) => run.seed, cell: (run) => (run.seed === null || run.seed === undefined ? NONE : word(run.seed)), ascending: true },
    { title: "fold", of: (run) => run.fold, cell: (run) => (run.fold === null || run.fold === undefined ? NONE : word(run.fold)), ascending: true },
    ...[data.metric, ...data.metrics.filter((name) => name !== data.metric && name.includes("/"))].map((name) => {
      const text = aligned(data.runs.map((run) => run.metrics[name]));
      return { title: name, of: (run) => run.metrics[name], cell: (run) => text(run.metrics[name]), ascending: name === data.metric ? data.direction === "min" : /loss|error|perplexity/.test(name), class: name === data.metric ? "main" : "" };
    }),
    { title: "time", help: "training time", of: (run) => run.seconds, cell: (run) => duration(run.seconds), ascending: true },
    ...["parameters", "latency_ms", "bytes", "macs"].map((key) => {
      const cost = COSTS.find((one) => one.key === key);
      return { title: { latency_ms: "latency", bytes: "size", macs: "MACs" }[key] || key, of: cost.of, cell: (run) => (isNumber(cost.of(run)) ? cost.text(cost.of(run)) : NONE), ascending: true };
    }),
  ].filter((column) => column.title === data.metric || has(column.of)).map((column) => ({ ...column, number: true }));
  return [
    { title: "Run", of: (run) => run.path, cell: runCell, class: "name" },
    { title: "State", of: (run) => STATES.indexOf(run.state), cell: (run) => el("span", { class: "state", title: run.sentence || false }, stateDot(run.state), run.state) },
    ...factorColumns(),
    ...numbers,
  ];
}

const folderOf = (run) => String(run.path || "").replace(/\/+$/, "").split("/").pop();

function runCell(run) {
  const folder = folderOf(run);
  return el("button", { type: "button", class: "open", title: run.path || false, on: { click: () => openRun(run) } }, run.name || folder, " ", el("small", {}, folder));
}
// A run or a group in full, at the side.
let opener = null, inHand = null;

function openDrawer(kind, title, body) {
  if (at("drawer").hidden) opener = document.activeElement;
  at("drawer-kind").replaceChildren(...kind);
  at("drawer-title").textContent = title;
  at("drawer-body").replaceChildren(...body.filter(Boolean));
  at("drawer").hidden = false;
  at("drawer-body").scrollTop = 0;
  at("drawer-title").focus({ preventScroll: true });
}

function closeDrawer() {
  at("drawer").hidden = true;
  mark(null);
  if (opener && opener.isConnected) opener.focus();
}

function mark(run) {
  for (const row of document.querySelectorAll("tr.chosen")) row.classList.remove("chosen");
  inHand = run;
  if (run) tables.runs.element(run).classList.add("chosen");
}

function pairsOf(entries, text = word) {
  return el("dl", {}, entries.map(([key, value]) => [el("dt", {}, key), el("dd", {}, text(value))]));
}

function part(title, ...content) {
  return el("section", {}, el("h3", {}, title), ...content);
}

function copied(text) {
  const button = el("button", { type: "button", class: "quiet" }, "Copy"), shown = el("pre", { tabindex: "0" }, text);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(shown);
      button.textContent = document.execCommand("copy") ? "Copied" : "Selected: copy it with Ctrl+C";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  return el("div", { class: "command" }, shown, button);
}

function flat(value, key = "") {
  if (value === null || typeof value !== "object" || (Array.isArray(value) && value.every((item) => item === null || typeof item !== "object"))) return [[key, value]];
  return Object.entries(value).flatMap(([name, item]) => flat(item, key ? `${key}.${name}` : name));
}

function sparkline([xs, ys]) {
  const known = ys.map((y, i) => [xs[i], y]).filter(([, y]) => isNumber(y));
  if (known.length < 2) return null;
  const [left, right] = [known[0][0], known[known.length - 1][0]], low = Math.min(...known.map((p) => p[1])), high = Math.max(...known.map((p) => p[1]));
  const way = known.map(([x, y]) => `${(120 * (x - left) / (right - left || 1)).toFixed(1)},${(22 - 20 * (high > low ? (y - low) / (high - low) : 0.5)).toFixed(1)}`);
  return svg("svg", { viewBox: "-2 0 124 24", class: "spark", "aria-hidden": "true" }, svg("polyline", { points: way.join(" ") }));
}

function curveList(run) {
  const rows = Object.keys(run.curves || {}).map((name) => {
    const found = curve(run, name), known = found[1].filter(isNumber);
    return [el("dt", {}, name), el("dd", { class: "curve" }, sparkline(found), known.length ? `${figure(known[known.length - 1])} at step ${found[0][found[0].length - 1].toLocaleString("en")}` : "no number")];
  });
  return rows.length ? part("Curves", el("dl", {}, rows)) : null;
}

// A link below the report's own folder, whatever the text says.
const inside = (path) => "./" + String(path).split("/").map(encodeURIComponent).join("/");

function openRun(run) {
  const group = data.groups[run.group], costs = COSTS.filter((cost) => isNumber(cost.of(run)));
  const differences = Object.entries(run.diff || {}), environment = Object.entries(run.environment || {}).filter(([, value]) => value !== null), receipt = run.receipt ? flat(run.receipt) : [];
  openDrawer([stateDot(run.state), ` ${run.state} run`], run.name || folderOf(run), [
    run.sentence ? el("p", { class: "notice" }, run.sentence) : null,
    el("p", { class: "path" }, run.path || "No run directory."),
    part("Metrics", Object.keys(run.metrics).length ? pairsOf(Object.entries(run.metrics), (value) => figure(value, 6)) : el("p", { class: "empty" }, `A run that is ${run.state} has none yet.`)),
    run.command ? part("Command to repeat it", copied(run.command)) : null,
    part("Configuration, where it differs", differences.length ? pairsOf(differences) : el("p", { class: "empty" }, "Nothing differs.")),
    Object.keys(run.factors).length ? part("Factors", pairsOf([...Object.entries(run.factors), ...(group ? [["group", group.label]] : [])])) : null,
    costs.length ? part("Cost", pairsOf(costs.map((cost) => [cost.title, cost.text(cost.of(run))]), String)) : null,
    curveList(run),
    environment.length ? part("Environment", pairsOf(environment)) : null,
    receipt.length ? part("Receipt", pairsOf(receipt, (value) => (isNumber(value) ? figure(value, 6) : word(value)))) : null,
    run.samples ? part("Samples", el("a", { href: inside(run.samples) }, run.samples)) : null,
  ]);
  for (const id of ["before", "after"]) at(id).hidden = false;
  mark(run);
}

function openGroup(group) {
  const pairs = data.pairs.filter((pair) => pair.a === group.index || pair.b === group.index);
  openDrawer(["group"], group.label || "all runs", [
    ...(group.marks || []).map((text) => el("p", { class: "notice" }, text)),
    part(data.metric, pairsOf([["complete runs", figure(group.n)], ["mean ± standard deviation", plusMinus(group.mean, group.std)], [`${confidence()} of the mean`, [group.interval ? between(group.interval) : null, group.why].filter(Boolean).join("; ") || "none"], ["best", figure(group.best)]], String)),
    pairs.length ? part("Compared", el("ul", {}, pairs.map((pair) => el("li", {}, `${labelOf(data.groups[pair.a])} against ${labelOf(data.groups[pair.b])}: ${isNumber(pair.difference) ? figure(pair.difference, 3) : "no difference"}. ${pair.says}`)))) : null,
    group.command ? part("Command to repeat it", copied(group.command)) : null,
    Object.keys(group.factors || {}).length ? part("Factors", pairsOf(Object.entries(group.factors))) : null,
    part("Runs", el("ul", { class: "runs" }, group.runs.map((run) => el("li", {}, stateDot(run.state), el("button", { type: "button", class: "open", on: { click: () => openRun(run) } }, folderOf(run)), el("span", {}, figure(metricOf(run))))))),
  ]);
  for (const id of ["before", "after"]) at(id).hidden = true;
  mark(null);
}

function startDrawer() {
  const go = (by) => {
    const place = view.ordered.indexOf(inHand), next = view.ordered[place + by];
    if (inHand && next) openRun(next);
  };
  at("close").addEventListener("click", closeDrawer);
  at("before").addEventListener("click", () => go(-1));
  at("after").addEventListener("click", () => go(1));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !at("drawer").hidden) closeDrawer();
  });
}
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
