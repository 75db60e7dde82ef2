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

function pairColumns() {
  const group = (pair) => data.groups[pair.a] || {};
  return [
    { title: "Group", of: (pair) => group(pair).label, cell: (pair) => groupCell(group(pair)), class: "name" },
    { title: "pairs", help: "seeds and folds that both have", number: true, of: (pair) => pair.n, cell: (pair) => figure(pair.n) },
    { title: "difference", number: true, ascending: data.direction === "min", of: (pair) => pair.difference, cell: (pair) => el("strong", {}, signed(pair.difference)), main: true },
    { title: confidence(), of: (pair) => (pair.interval ? pair.interval[1] - pair.interval[0] : null), cell: (pair) => (pair.interval ? `${signed(pair.interval[0])} to ${signed(pair.interval[1])}` : NONE) },
    { title: "p", number: true, ascending: true, of: (pair) => pair.p, cell: (pair) => (isNumber(pair.p) && pair.p < 0.001 ? "< 0.001" : figure(pair.p, 2)) },
    { title: "What it says", cell: (pair) => pair.says, class: "says-cell" },
  ];
}

function intervalCell(group, low, high) {
  const said = group.interval ? between(group.interval) : group.why || "no interval"; // the head tells the why of others
  return el("div", {}, isNumber(group.mean) ? forest(group, low, high) : null, el("span", { class: "quiet-text" }, said));
}

function groupCell(group) {
  const marks = (group.marks || []).map((mark) => el("span", { class: "mark", title: mark }, "⚠ ", el("span", { class: "unseen" }, mark)));
  return el("div", {}, el("button", { type: "button", class: "open", title: group.label || false, on: { click: () => openGroup(group) } }, labelOf(group)), ...marks);
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
