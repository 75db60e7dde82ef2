"""The tables and the plot of each suite of training runs."""

from collections.abc import Callable, Mapping
from typing import Any

from lathe.measure import plot
from suites.results import MIB, Columns, Facts, Figure, Results, Spread, fact, full, middle

Written = tuple[list[str], str]  # tables with sentences, and a plot


def state(result: Mapping[str, Any]) -> float:
    """Return the bytes of a process's parameters and optimizer."""
    return float(result["parameters"] + result["optimizer"])


def rest(result: Mapping[str, Any]) -> float:
    """Return the bytes at the peak except parameters, gradients and optimizer."""
    return float(result["peak"]) - result["gradients"] - state(result)


def forward_share(result: Mapping[str, Any]) -> float:
    """Return the forward pass as a share of the step."""
    return float(result["forward_ms"] / result["mean_step_ms"])


def speed_up(results: Results, facts: Facts, name: str) -> Spread | None:
    """Return samples/s over those of one process of the strategy, or of auto if it needs several."""
    one = f"{facts[name]['strategy']}, 1, weak"
    return results.ratio(name, one if one in results else "auto, 1, weak", "samples_per_s")


def efficiency(results: Results, facts: Facts, name: str) -> Spread | None:
    """Return the speed-up over one process divided by the number of processes."""
    gain = speed_up(results, facts, name)
    return gain and Spread([value / facts[name]["processes"] for value in gain.values])


def scaling(facts: Facts, results: Results) -> Written:
    """Tabulate time and efficiency; draw the speed-up by processes."""

    def label(name: str) -> str:
        return facts[name]["strategy"] + ("" if facts[name]["sync"] else ", gradients not summed")

    def over_auto(name: str) -> str:
        shown = facts[name]["processes"] == 1 and facts[name]["strategy"] != "auto"
        return full(results.ratio(name, "auto, 1, weak", "step_ms")) if shown else ""

    columns: Columns = {
        "strategy": label,
        "processes": fact(facts, "processes"),
        "mode": lambda name: facts[name]["mode"] if facts[name]["processes"] > 1 else "-",
        "global batch": fact(facts, "batch_size"),
        "step, ms": lambda name: full(results.spread(name, "step_ms"), ".2f"),
        "samples/s": lambda name: middle(results.spread(name, "samples_per_s"), ",.0f"),
        "step time over auto's": over_auto,
        "efficiency": lambda name: full(efficiency(results, facts, name)) if facts[name]["processes"] > 1 else "",
        "waiting for gradients": lambda name: middle(results.spread(name, "grad_sync"), ".1%"),
        "peak, MiB": lambda name: _mib(results, name, ",.1f"),
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

    def mib(own: Results, key: str) -> Callable[[str], str]:
        return lambda name: f"{own[name][0][key] / MIB:.2f}"

    def share(own: Results, base: str, figure: Figure) -> Callable[[str], str]:
        return lambda name: middle(own.ratio(name, base, figure), ".3f")

    def part(kind: str, heading: str, base: str, shares: dict[str, Figure]) -> str:
        own = Results({name: rounds for name, rounds in results.items() if facts[name]["part"] == kind})
        columns: Columns = {
            heading: fact(facts, kind),
            "processes": fact(facts, "processes"),
            **{f"{key}, MiB": mib(own, key) for key in counted},
            **{text: share(own, base, of) for text, of in shares.items()},
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
    stacks = {name: {key: found[key] / MIB for key in counted[:4]} for name, found in measured.items()}
    return [text, *tables], plot.stacks("Memory of a process", "MiB", stacks)


def gpu(facts: Facts, results: Results) -> Written:
    """Tabulate time, memory and model FLOPs utilization of each net, strategy and precision."""
    columns: Columns = {
        **{key: fact(facts, key) for key in ("net", "strategy", "precision")},
        "step, ms": lambda name: full(results.spread(name, "step_ms"), ".2f"),
        "samples/s": lambda name: middle(results.spread(name, "samples_per_s"), ",.1f"),
        "peak, MiB": lambda name: _mib(results, name, ",.0f"),
        "mfu": lambda name: middle(results.spread(name, "mfu"), ".1%"),
    }
    return [results.table(columns, facts=3)], plot.stacks(
        "Time of a step", "ms", results.medians("step, ms", "step_ms")
    )


def overhead(facts: Facts, results: Results) -> Written:
    """Tabulate the mean of a turn's steps, since some methods act every few steps only."""
    columns: Columns = {
        "method": str,
        "step, ms (CPU time on a CPU)": lambda name: full(results.spread(name, "mean_step_ms"), ".2f"),
        "over the plain step": lambda name: full(results.ratio(name, "plain", "mean_step_ms")),
    }
    share = full(results.spread("plain", forward_share))
    text = f"A forward pass of the plain net, as its teacher runs it: {share} of a step.\n"
    drawing = plot.stacks("Time of a training step", "ms", results.medians("step, ms", "mean_step_ms"))
    return [results.table(columns), text], drawing


def precision(facts: Facts, results: Results) -> Written:
    """Tabulate time, memory and metric of each number format."""
    base = next(iter(facts))
    columns: Columns = {
        "precision": str,
        "step, ms": lambda name: full(results.spread(name, "step_ms"), ".2f"),
        f"step over {base}'s": lambda name: _over(results, name, base, "step_ms"),
        "speed-up": lambda name: _over(results, name, base, "samples_per_s"),
        **_short_training(results),
    }
    return [results.table(columns)], plot.stacks("Time of a step", "ms", results.medians("step, ms", "step_ms"))


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
        f"speed-up over {base}": lambda name: _over(results, name, base, "samples_per_s"),
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
        "cold, s": lambda name: full(results.spread(name, "cold_s"), ".2f"),
        "warm, s": lambda name: full(results.spread(name, "warm_s"), ".2f"),
        "step, ms": lambda name: full(results.spread(name, "step_ms"), ".2f"),
        "speed-up over none": lambda name: _over(results, name, "none", "samples_per_s"),
        "epoch, s": lambda name: middle(results.spread(name, "epoch_s"), ".2f"),
        "peak, MiB": lambda name: _mib(results, name, ",.0f"),
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
        "samples/s": lambda name: middle(results.spread(name, "samples_per_s"), ",.0f"),
        "epoch, s": lambda name: middle(results.spread(name, "epoch_s"), ".2f"),
        "peak, MiB": lambda name: _mib(results, name, ",.1f"),
        "updates": lambda name: str(results[name][0].get("updates", "")),
        ", ".join(metrics) or "validation": reached,
    }


def _mib(results: Results, name: str, spec: str) -> str:
    peak = results.spread(name, "peak")
    return "" if peak is None else f"{peak.median / MIB:{spec}}"


def _over(results: Results, name: str, base: str, figure: str) -> str:
    return "" if name == base else full(results.ratio(name, base, figure))


TABLES: dict[str, Callable[[Facts, Results], Written]] = {
    "scaling": scaling,
    "memory": memory,
    "gpu": gpu,
    "overhead": overhead,
    "precision": precision,
    "compile": compiled,
    "parallel": parallel,
}
