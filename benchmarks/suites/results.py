"""Statistics over rounds, tables and plots of each suite, their limits, and the files that a suite writes."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from lathe.errors import did_you_mean, require
from lathe.files import write_atomically
from lathe.measure import plot
from lathe.runs.rundir import describe_environment

MIB = 2**20
Facts = Mapping[str, Mapping[str, Any]]  # by case, what distinguishes it from the others
Cell = Callable[[str], str]  # the text of a case in a column
Columns = dict[str, Cell]  # by heading
Figure = str | Callable[[Mapping[str, Any]], float | None]  # a key of a round's result, or a function of it


class Spread:
    """The values of several rounds; a format such as `.2f` shows the median, and the range if there are several."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = list(values)
        self.median, self.low, self.high = median(values), min(values), max(values)

    def __format__(self, spec: str) -> str:
        middle, low, high = (format(value, spec or ".3f") for value in (self.median, self.low, self.high))
        return f"{middle} ({low} to {high})" if len(self.values) > 1 else middle

    def __str__(self) -> str:
        return format(self)


class Results(dict[str, list[dict[str, Any]]]):
    """By case, the result of each round: its figures, or `error` with the reason why it has none."""

    def spread(self, name: str, figure: Figure) -> Spread | None:
        """Return a figure of a case over the rounds; None without values."""
        values = [value for result in self.get(name, []) if (value := _value(result, figure)) is not None]
        return Spread(values) if values else None

    def ratio(self, name: str, base: str | None, figure: Figure) -> Spread | None:
        """Return a case's figure over its base's within each round, in which both ran shortly after each other."""
        pairs = zip(self.get(name, []), self.get(base or "", []), strict=False)
        values = [(_value(mine, figure), _value(theirs, figure)) for mine, theirs in pairs]
        shares = [mine / theirs for mine, theirs in values if mine is not None and theirs]
        return Spread(shares) if shares else None

    def error(self, name: str) -> str | None:
        """Return the reason why a case has no figures; None if it has some."""
        rounds = self.get(name, [])
        return next((r["error"] for r in rounds if "error" in r), None if rounds else "not measured")

    def medians(self, label: str, figure: Figure) -> dict[str, dict[str, float]]:
        """Return the columns of a bar chart: the median of a figure of each case that has it."""
        spreads = {name: self.spread(name, figure) for name in self}
        return {name: {label: spread.median} for name, spread in spreads.items() if spread}

    def cells(self, figure: Figure, spec: str) -> Cell:
        """Return the cell of a column: the median of a figure and its range."""
        return lambda name: show(self.spread(name, figure), spec)

    def middles(self, figure: Figure, spec: str) -> Cell:
        """Return the cell of a column: the median of a figure."""
        return lambda name: show(self.spread(name, figure), spec, range_too=False)

    def over(self, base: str, figure: Figure) -> Cell:
        """Return the cell of a column: a figure over the base's; empty for the base itself."""
        return lambda name: "" if name == base else show(self.ratio(name, base, figure))

    def table(self, columns: Columns, facts: int = 1) -> str:
        """Return a table with a row for each case.

        `columns` are functions of the case's name by heading. The first ones, `facts` in number, are shown also for a
        case without figures, followed by its error.
        """
        rows = []
        for name in self:
            error, cells = self.error(name), [*columns.values()]
            shown = cells if error is None else cells[:facts]
            row = [cell(name) for cell in shown] + ([] if error is None else [error])
            rows.append([*row, *[""] * (len(cells) - len(row))])
        return table([*columns], rows)


def _value(result: Mapping[str, Any], figure: Figure) -> float | None:
    if "error" in result:
        return None
    return figure(result) if callable(figure) else result.get(figure)


def fact(facts: Facts, key: str) -> Cell:
    """Return the cell of a column of facts."""
    return lambda name: str(facts[name][key])


def show(spread: Spread | None, spec: str = ".3f", range_too: bool = True) -> str:
    """Return the median, and the range of several rounds; nothing for None."""
    return "" if spread is None else format(spread if range_too else spread.median, spec)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def write(
    output: Path,
    texts: Sequence[str],
    drawing: str,
    facts: Facts,
    results: Results,
    request: Mapping[str, Any],
    seconds: float,
) -> None:
    """Print `texts`, and write results.md, results.json and plot.svg into `output`.

    Raises:
        UserError: no case has figures.
    """
    errors = [results.error(name) for name in results]
    require(None in errors, f"suite={request['suite']}: nothing could be measured ({errors[0]}).")
    environment = {key: value for key, value in describe_environment().items() if key != "git_diff"}
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    under = (
        f"{environment['cpu']}, {environment['cores']} cores, threads={request['threads']}; Python "
        f"{environment['python']}, {packages}. Medians (lowest to highest) of n = {request['rounds']} rounds in turns"
        f"{f', steps={steps}' if (steps := request.get('steps')) else ''}; ratios are taken round by round. "
        f"{seconds:.0f} s.\n"
    )
    text = "\n".join([*texts, under])
    cases = [{"name": name, **facts[name], "rounds": rounds} for name, rounds in results.items()]
    written = {"request": request, "environment": environment, "cases": cases}
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / "results.md", text)
    write_atomically(output / "plot.svg", drawing)
    write_atomically(output / "results.json", json.dumps(written, indent=2) + "\n")
    print(f"\n{text}\nWritten to {output}", flush=True)


Written = tuple[list[str], str]  # tables with sentences, and a plot


# Figures that follow from others of a round


def state(result: Mapping[str, Any]) -> float:
    """Return the bytes of a process's parameters and optimizer."""
    return float(result["parameters"] + result["optimizer"])


def rest(result: Mapping[str, Any]) -> float:
    """Return the bytes at the peak except parameters, gradients and optimizer."""
    return float(result["peak"]) - result["gradients"] - state(result)


def peak_mib(result: Mapping[str, Any]) -> float | None:
    return None if result.get("peak") is None else result["peak"] / MIB


def forward_share(result: Mapping[str, Any]) -> float:
    """Return the forward pass as a share of the step."""
    return float(result["forward_ms"] / result["mean_step_ms"])


def warm_share(result: Mapping[str, Any]) -> float:
    return float(result["warm_s"] / result["cold_s"]) if result["cold_s"] else 0.0


def late_graphs(result: Mapping[str, Any]) -> float:
    return float(result["breaks"] + result["anew"])


# The suites' tables and plots


def speed_up(results: Results, facts: Facts, name: str) -> Spread | None:
    """Return samples/s over those of one process of the strategy, or of auto if it needs several."""
    base = f"{facts[name]['strategy']}, 1, weak"
    return results.ratio(name, base if base in results else "auto, 1, weak", "samples_per_s")


def efficiency(results: Results, facts: Facts, name: str) -> Spread | None:
    """Return the speed-up over one process divided by the number of processes."""
    gain = speed_up(results, facts, name)
    return gain and Spread([value / facts[name]["processes"] for value in gain.values])


def scaling(facts: Facts, results: Results) -> Written:
    """Tabulate time and efficiency; draw the speed-up by processes."""

    def label(name: str) -> str:
        return facts[name]["strategy"] + ("" if facts[name]["sync"] else ", gradients not summed")

    over_auto, many = results.over("auto, 1, weak", "step_ms"), lambda name: facts[name]["processes"] > 1
    columns: Columns = {
        "strategy": label,
        "processes": fact(facts, "processes"),
        "mode": lambda name: facts[name]["mode"] if many(name) else "-",
        "global batch": fact(facts, "batch_size"),
        "step, ms": results.cells("step_ms", ".2f"),
        "samples/s": results.middles("samples_per_s", ",.0f"),
        "step time over auto's": lambda name: "" if many(name) else over_auto(name),
        "efficiency": lambda name: show(efficiency(results, facts, name)) if many(name) else "",
        "waiting for gradients": results.middles("grad_sync", ".1%"),
        "peak, MiB": results.middles(peak_mib, ",.1f"),
    }
    lines = dict[str, list[plot.Point]]()
    for name, about in facts.items():
        gain = speed_up(results, facts, name)
        if gain and about["processes"] > 1:
            points = lines.setdefault(f"{label(name)}, {about['mode']}", [(1.0, 1.0, 1.0, 1.0)])
            points.append((float(about["processes"]), gain.median, gain.low, gain.high))
    ticks = sorted({x for points in lines.values() for x, *_ in points}) or [1.0]
    title = "Speed-up over one process of the same strategy"
    drawing = plot.lines(title, "processes", "speed-up", lines, diagonal=(ticks[0], ticks[-1]), ticks=ticks)
    return [results.table(columns, facts=4)], drawing


def memory(facts: Facts, results: Results) -> Written:
    """Tabulate the bytes of a process by strategy, and by activation checkpointing."""
    counted = ("parameters", "gradients", "optimizer", "activations", "peak")

    def mib(key: str) -> Cell:
        return lambda name: f"{results[name][0][key] / MIB:.2f}"

    def part(kind: str, heading: str, base: str, shares: dict[str, Figure]) -> str:
        own = Results({name: rounds for name, rounds in results.items() if facts[name]["part"] == kind})
        columns: Columns = {
            heading: fact(facts, kind),
            "processes": fact(facts, "processes"),
            **{f"{key}, MiB": mib(key) for key in counted},
            **{text: own.over(base, figure) for text, figure in shares.items()},
        }
        return own.table(columns, facts=2)

    text = (
        "Counted in one process, the fullest, in the last step of a short run: by storage, DTensors and partitions as "
        "this process's share. Activations: the most that autograd kept at a moment. Peak: the most of all tensors at "
        "a moment (CPU: storages that live after any operation; GPU: torch.cuda.max_memory_allocated).\n"
    )
    shares: dict[str, Figure] = {"activations over none's": "activations", "rest at the peak over none's": rest}
    tables = [
        part("strategy", "strategy", "auto, 1", {"parameters + optimizer over auto's": state}),
        part("activation_checkpointing", "activation checkpointing", "auto, 1, none", shares),
    ]
    measured = {name: rounds[0] for name, rounds in results.items() if results.error(name) is None}
    stacks = {name: {key: result[key] / MIB for key in counted[:4]} for name, result in measured.items()}
    return [text, *tables], plot.stacks("Memory of a process", "MiB", stacks)


def overhead(facts: Facts, results: Results) -> Written:
    """Tabulate the mean of a turn's steps, since some methods act every few steps only."""
    columns: Columns = {
        "method": str,
        "step, ms (CPU time on a CPU)": results.cells("mean_step_ms", ".2f"),
        "over the plain step": results.over("plain", "mean_step_ms"),
    }
    share = show(results.spread("plain", forward_share))
    text = f"A forward pass of the plain net, as its teacher runs it: {share} of a step.\n"
    drawing = plot.stacks("Time of a training step", "ms", results.medians("step, ms", "mean_step_ms"))
    return [results.table(columns), text], drawing


def gpu(facts: Facts, results: Results) -> Written:
    """Tabulate time, memory and model FLOPs utilization of each net, strategy and precision."""
    columns: Columns = {
        **{key: fact(facts, key) for key in ("net", "strategy", "precision")},
        "step, ms": results.cells("step_ms", ".2f"),
        "samples/s": results.middles("samples_per_s", ",.1f"),
        "peak, MiB": results.middles(peak_mib, ",.0f"),
        "mfu": results.middles("mfu", ".1%"),
    }
    return [results.table(columns, facts=3)], _steps(results)


def precision(facts: Facts, results: Results) -> Written:
    """Tabulate time, memory and metric of each number format."""
    base = next(iter(facts))
    columns: Columns = {
        "precision": str,
        "step, ms": results.cells("step_ms", ".2f"),
        f"step over {base}'s": results.over(base, "step_ms"),
        "speed-up": results.over(base, "samples_per_s"),
        **_short_training(results),
    }
    return [results.table(columns)], _steps(results)


def _steps(results: Results) -> str:
    return plot.stacks("Time of a step", "ms", results.medians("step, ms", "step_ms"))


def parallel(facts: Facts, results: Results) -> Written:
    """Tabulate speed, memory and metric of each way to use several devices."""
    base = next(iter(facts))

    def rate(name: str) -> str:
        warmup = facts[name]["warmup"]
        return f"{facts[name]['lr']:g}" + (f", warmed up for {warmup:.0%} of the run" if warmup else "")

    columns: Columns = {
        "row": str,
        "devices": fact(facts, "processes"),
        "global batch": fact(facts, "batch_size"),
        "learning rate": rate,
        f"speed-up over {base}": results.over(base, "samples_per_s"),
        **_short_training(results),
    }
    drawing = plot.stacks("Throughput", "samples/s", results.medians("samples/s", "samples_per_s"))
    return [results.table(columns, facts=4)], drawing


def compiled(facts: Facts, results: Results) -> Written:
    """Tabulate the start and the step of each way to compile."""

    def most(name: str, figure: str) -> str:
        return f"{max(result[figure] for result in results[name])}"

    columns: Columns = {
        "compile": str,
        "cold, s": results.cells("cold_s", ".2f"),
        "warm, s": results.cells("warm_s", ".2f"),
        "step, ms": results.cells("step_ms", ".2f"),
        "speed-up over none": results.over("none", "samples_per_s"),
        "epoch, s": results.middles("epoch_s", ".2f"),
        "peak, MiB": results.middles(peak_mib, ",.0f"),
        "graph breaks": lambda name: most(name, "breaks"),
        "graphs made after the warm-up": lambda name: most(name, "anew"),
    }
    text = (
        "Cold and warm: what the first steps took beyond their own time, with an empty folder of compiled code and in "
        "a fresh process with what the first has left. Step and memory: of the second process, after these steps; on "
        "a CPU the memory is the whole process's, with libraries.\n"
    )
    warm = results.medians("warm, s", "warm_s")
    heights = {name: cold | warm[name] for name, cold in results.medians("cold, s", "cold_s").items()}
    return [results.table(columns), text], plot.stacks("Start of a compiled run", "s", heights)


def _short_training(results: Results) -> Columns:
    """Return the columns of suites that also train for some epochs."""
    metrics = sorted({str(r["metric"]) for rounds in results.values() for r in rounds if r.get("metric")})

    def reached(name: str) -> str:
        first = results[name][0]
        return "" if "metric" not in first else "not finite" if first["reached"] is None else f"{first['reached']:.4f}"

    return {
        "samples/s": results.middles("samples_per_s", ",.0f"),
        "epoch, s": results.middles("epoch_s", ".2f"),
        "peak, MiB": results.middles(peak_mib, ",.1f"),
        ", ".join(metrics) or "validation": reached,
    }


TABLES: dict[str, Callable[[Facts, Results], Written]] = {
    "scaling": scaling,
    "memory": memory,
    "gpu": gpu,
    "overhead": overhead,
    "precision": precision,
    "compile": compiled,
    "parallel": parallel,
}


class Threshold(NamedTuple):
    """A limit of a figure. Without `at_most` and `at_least` it is only shown; an unmeasured figure misses it."""

    sentence: str
    measured: Spread | None
    at_most: float | None = None
    at_least: float | None = None

    @property
    def met(self) -> bool:
        if self.measured is None:
            return self.at_most is None and self.at_least is None
        low = self.at_least is None or self.measured.median >= self.at_least
        return low and (self.at_most is None or self.measured.median <= self.at_most)

    @property
    def full(self) -> str:
        """The sentence with its limit."""
        if self.at_most is None and self.at_least is None:
            return self.sentence
        how = f"at least {self.at_least:.2f}" if self.at_most is None else f"at most {self.at_most:.2f}"
        return f"{self.sentence} {how}"

    @property
    def verdict(self) -> str:
        if self.at_most is None and self.at_least is None:
            return ""
        return "-" if self.measured is None else "met" if self.met else "missed"


def rows(thresholds: list[Threshold], heading: str = "threshold") -> str:
    """Return a table of the limits, the measured values, and whether the medians meet them."""
    cells = [[item.full, str(item.measured or "not measured"), item.verdict] for item in thresholds]
    return table([heading, "measured", ""], cells)


def missed(thresholds: list[Threshold]) -> list[str]:
    """Return a message for each threshold that is not met or not measured."""
    return [f"missed: expected {t.full}, got {t.measured or 'no measurement'}." for t in thresholds if not t.met]


def limits(request: Mapping[str, Any], facts: Facts) -> dict[str, float]:
    """Return the request's thresholds by name, or the suite's own.

    Raises:
        UserError: a threshold of a figure that this request does not measure, or `assert` without thresholds.
    """
    suite, possible = request["suite"], _measured(request, facts, Results())
    if (thresholds := request.get("thresholds")) is None:
        thresholds = _own_limits(request, facts)
    wanted = {str(name): float(limit) for name, limit in thresholds.items()}
    for name in wanted:
        hint = did_you_mean(name, possible) if possible else "it has no thresholds."
        require(name in possible, f"thresholds.{name}: suite={suite} does not measure {name} here; {hint}")
    need = f"assert=true: suite={suite} has no default thresholds for this request. Set thresholds."
    require(bool(wanted) or not request.get("assert"), need)
    return wanted


def judge(request: Mapping[str, Any], facts: Facts, results: Results) -> list[Threshold]:
    """Return the request's thresholds, each with its measured value."""
    measured = _measured(request, facts, results)
    return [
        Threshold(sentence, spread, **{kind: limit})
        for name, limit in request["thresholds"].items()
        for sentence, spread, kind in measured[name]
    ]


def _own_limits(request: Mapping[str, Any], facts: Facts) -> dict[str, float]:
    share = {2: 0.85, 4: 0.80, 8: 0.75}  # efficiency by number of processes
    counts = {about["processes"] for about in facts.values()}
    if request["suite"] == "scaling":
        return {str(n): share[n] for n in sorted(counts) if n in share}
    if request["suite"] == "parallel":
        n = max(counts)
        return {"ddp_scaled": share[n] * n} if n in share else {}
    if request["suite"] == "precision" and request["accelerator"] == "gpu":  # published for BERT-large
        return {"16-mixed": 2.3, "16-mixed_memory": 0.6}
    return {"warm": 0.3, "regional": 0.5, "anew": 0.0} if request["suite"] == "compile" else {}


def _measured(
    request: Mapping[str, Any], facts: Facts, results: Results
) -> dict[str, list[tuple[str, Spread | None, str]]]:
    """Return sentence, value and kind of limit of what a suite measures, by the names of `thresholds`."""
    suite, measured = request["suite"], dict[str, list[tuple[str, Spread | None, str]]]()
    if suite == "scaling":
        for name, about in facts.items():
            if about["processes"] > 1 and about["mode"] == "weak" and about["sync"]:
                entry = (f"{name}: efficiency", efficiency(results, facts, name), "at_least")
                measured.setdefault(str(about["processes"]), []).append(entry)
    if suite not in ("parallel", "precision", "compile"):
        return measured
    base, *others = facts
    for name in others:
        gain = results.ratio(name, base, "samples_per_s")
        measured[name] = [(f"{name}: speed-up over {base}", gain, "at_least")]
        if suite == "precision":  # the peak is measured in the first round only
            share = results.ratio(name, base, "peak")
            measured[f"{name}_memory"] = [(f"{name}: memory at the peak over {base}'s", share, "at_most")]
    if suite == "compile":
        regional = results.ratio("regional", "default", "cold_s")
        measured["regional"] = [("regional: cold start over the whole net's", regional, "at_most")]
        sentences = {"warm": ("warm start over the cold one", warm_share)}
        sentences["anew"] = ("graph breaks and graphs made after the warm-up", late_graphs)
        for key, (text, figure) in sentences.items():
            measured[key] = [(f"{name}: {text}", results.spread(name, figure), "at_most") for name in others]
    return measured


# This project's bars of suites whose thresholds a request may set, printed in addition to them


def scaling_bars(results: Results) -> list[Threshold]:
    pair = "ddp, 2, weak"
    gain = results.ratio(pair, "ddp, 1, weak", "samples_per_s")
    alone = results.ratio(pair, f"{pair}, no sync", "samples_per_s")
    over_auto = {name: results.ratio(f"{name}, 1, weak", "auto, 1, weak", "step_ms") for name in ("ddp", "fsdp")}
    return [
        *(Threshold(f"{name}, 1 process: step time over auto's", r, at_most=1.05) for name, r in over_auto.items()),
        Threshold(f"{pair}: efficiency", gain and Spread([value / 2 for value in gain.values]), at_least=0.90),
        Threshold("the same over two processes that sum no gradients: what the machine leaves to ddp", alone),
    ]


def memory_bars(results: Results) -> list[Threshold]:
    shares = {name: results.ratio(f"{name}, 2", "auto, 1", state) for name in ("fsdp", "deepspeed_3")}
    dense = "parameters and optimizer of a process over the dense ones,"
    deep, none = "auto, 1, sqrt", "auto, 1, none"
    activations, peak = results.ratio(deep, none, "activations"), results.ratio(deep, none, rest)
    return [
        *(Threshold(f"{name}, 2: {dense}", share, at_most=0.60) for name, share in shares.items()),
        Threshold("sqrt, 64 blocks: activations kept for backward over those of none,", activations, at_most=0.35),
        Threshold("sqrt, 64 blocks: rest at the peak over that of none,", peak, at_most=0.35),
    ]


def overhead_bars(results: Results) -> list[Threshold]:
    forward = results.spread("plain", forward_share)
    limits = {"prune": 1.03, "qat": 1.60, "distill": 1.05 + (forward.median if forward else 0.0)}  # + a forward pass
    ratios = {name: results.ratio(name, "plain", "mean_step_ms") for name in limits}
    return [Threshold(f"{name}: step over the plain one's,", ratios[name], at_most=limits[name]) for name in limits]


BARS = {"scaling": scaling_bars, "memory": memory_bars, "overhead": overhead_bars}
