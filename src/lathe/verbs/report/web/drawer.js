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
