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
