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

let data, points;

async function open() {
  data = JSON.parse(decoded(await inflated("data")));
  const packed = new Uint8Array(await inflated("points")), half = packed.length / 2;
  points = new Int16Array(half);
  for (let i = 0; i < half; i++) points[i] = packed[i] | (packed[half + i] << 8);
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

// Steps and values of a curve; a value that is no number is NaN. page.py packs them.
function curve(run, name) {
  const kept = run.curves && run.curves[name];
  if (!kept) return null;
  const [steps, low, step, begin] = kept, xs = data.steps[steps], ys = new Array(xs.length);
  let level = 0;
  for (let i = 0; i < xs.length; i++) {
    const change = points[begin + i];
    if (change === -32768) ys[i] = NaN;
    else ys[i] = low + step * (level += change);
  }
  return [xs, ys];
}
