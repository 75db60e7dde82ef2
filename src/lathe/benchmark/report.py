"""Tables and a plot of a suite's results."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from lathe.benchmark import tables, thresholds
from lathe.benchmark.cases import Case
from lathe.benchmark.spread import Results, Spread, rate, ratio, spread, table
from lathe.benchmark.tables import MIB, efficiency, error_of
from lathe.benchmark.written import write_files
from lathe.measure import plot


def state(result: Mapping[str, Any]) -> float:
    """Return the bytes of a process's parameters and optimizer."""
    return float(result["parameters"] + result["optimizer"])


def rest(result: Mapping[str, Any]) -> float:
    """Return the bytes at the peak except parameters, gradients and optimizer."""
    return float(result["peak"]) - result["gradients"] - state(result)


def scaling(cases: Sequence[Case], results: Results) -> tuple[list[str], str]:
    rows: list[list[str]] = []
    lines = dict[str, list[plot.Point]]()
    for case in cases:
        n, strategy, facts = case.processes, case.facts["strategy"], case.facts
        step, speed = spread(results, case.name, "step_ms"), spread(results, case.name, "samples_per_s")
        if step is None or speed is None:
            rows.append([strategy, str(n), facts["mode"], str(facts["batch_size"]), error_of(results, case), *[""] * 5])
            continue
        to_auto = ratio(results, case.name, "auto, 1, weak", lambda r: 1 / rate(r))
        gain, share = efficiency(results, case.name, strategy, n)
        sync, peak = spread(results, case.name, "grad_sync"), spread(results, case.name, "peak")
        what = strategy if case.sync else f"{strategy}, gradients not summed"
        rows.append(
            [
                what,
                str(n),
                facts["mode"] if n > 1 else "-",
                str(facts["batch_size"]),
                step.short,
                f"{speed.median:,.0f}",
                str(to_auto) if n == 1 and strategy != "auto" else "",
                str(share) if n > 1 else "",
                f"{sync.median:.1%}" if sync else "",
                f"{peak.median / MIB:,.1f}" if peak else "",
            ]
        )
        if gain and n > 1:
            points = lines.setdefault(f"{what}, {facts['mode']}", [(1.0, 1.0, 1.0, 1.0)])
            points.append((float(n), gain.median, gain.low, gain.high))
    head = [
        "strategy",
        "processes",
        "mode",
        "global batch",
        "step, ms",
        "samples/s",
        "step time over auto's",
        "efficiency",
        "waiting for gradients",
        "peak, MiB",
    ]
    title = "Speed-up over one process of the same strategy"
    ticks = sorted({x for points in lines.values() for x, *_ in points}) or [1.0]
    ends = (ticks[0], ticks[-1])
    return [table(head, rows)], plot.lines(title, "processes", "speed-up", lines, diagonal=ends, ticks=ticks)


def memory(cases: Sequence[Case], results: Results) -> tuple[list[str], str]:
    parts = ("parameters", "gradients", "optimizer", "activations", "peak")
    rows: dict[str, list[list[str]]] = {"strategy": [], "checkpointing": []}
    stacks = dict[str, dict[str, float]]()
    for case in cases:
        part, found = case.facts["part"], results[case.name][0]
        who = case.facts.get("strategy") or case.facts["activation_checkpointing"]
        if "error" in found:
            rows[part].append([who, str(case.processes), error_of(results, case), *[""] * 5])
            continue
        against, of = ("auto, 1", state) if part == "strategy" else ("auto, 1, none", itemgetter("activations"))
        share = ratio(results, case.name, against, of)
        beside = ratio(results, case.name, against, rest) if part == "checkpointing" else None
        cells = [
            who,
            str(case.processes),
            *(f"{found[name] / MIB:.2f}" for name in parts),
            f"{share.median:.3f}" if share else "",
        ]
        rows[part].append([*cells, f"{beside.median:.3f}" if beside else ""] if part == "checkpointing" else cells)
        stacks[case.name] = {name: found[name] / MIB for name in parts[:4]}
    head = ["processes", *(f"{name}, MiB" for name in parts)]
    text = [
        "Counted in one process, the fullest, in the last step of a short run: by storage, DTensors and partitions as "
        "this process's part. Activations: the most that autograd kept at a moment. Peak: the most of all tensors at a "
        "moment (CPU: storages that live after any operation; GPU: torch.cuda.max_memory_allocated).\n",
        table(["strategy", *head, "parameters + optimizer over auto's"], rows["strategy"]),
        table(
            ["activation checkpointing", *head, "activations over none's", "rest at the peak over none's"],
            rows["checkpointing"],
        ),
    ]
    return text, plot.stacks("Memory of a process", "MiB", stacks)


def gpu(cases: Sequence[Case], results: Results) -> tuple[list[str], str]:
    rows, heights = [], dict[str, dict[str, float]]()
    for case in cases:
        facts, step, peak = case.facts, spread(results, case.name, "step_ms"), spread(results, case.name, "peak")
        first = [facts["net"], facts["strategy"], facts["precision"]]
        if step is None or peak is None:
            rows.append([*first, error_of(results, case), *[""] * 3])
            continue
        speed, mfu = spread(results, case.name, "samples_per_s"), spread(results, case.name, "mfu")
        rows.append(
            [
                *first,
                step.short,
                f"{speed.median:,.1f}" if speed else "",
                f"{peak.median / MIB:,.0f}",
                f"{mfu.median:.1%}" if mfu else "",
            ]
        )
        heights[case.name] = {"step, ms": step.median}
    head = ["net", "strategy", "precision", "step, ms", "samples/s", "peak, MiB", "mfu"]
    return [table(head, rows)], plot.stacks("Time of a step", "ms", heights)


def overhead(cases: Sequence[Case], results: Results) -> tuple[list[str], str]:
    """Tabulate means over a turn's steps, as some methods act every few steps only; on a CPU of CPU time."""
    rows, heights = [], dict[str, dict[str, float]]()
    shares = forward_shares(results)
    for case in cases:
        mean, over = (
            spread(results, case.name, "mean_step_ms"),
            ratio(results, case.name, "plain", itemgetter("mean_step_ms")),
        )
        if mean is None or over is None:
            rows.append([case.name, error_of(results, case), ""])
            continue
        rows.append([case.name, mean.short, str(over)])
        heights[case.name] = {"step, ms": mean.median}
        if shares and case.name == "distill":
            share = f"{Spread(shares)} of a step"
            rows.append(["a forward pass of the plain net, as its teacher runs it", "", share])
    head = ["method", "step, ms (CPU time on a CPU)", "over the plain step"]
    return [table(head, rows)], plot.stacks("Time of a training step", "ms", heights)


def forward_shares(results: Results) -> list[float]:
    """Return the plain net's forward pass as a share of its step, round by round."""
    return [r["forward_ms"] / r["mean_step_ms"] for r in results.get("plain", []) if "error" not in r]


REPORTS: dict[str, Callable[[Sequence[Case], Results], tuple[list[str], str]]] = {
    "scaling": scaling,
    "memory": memory,
    "gpu": gpu,
    "overhead": overhead,
    "precision": tables.precision,
    "compile": tables.compiled,
    "parallel": tables.parallel,
}


def write(output: Path, cases: Sequence[Case], results: Results, request: dict[str, Any], seconds: float) -> str:
    """Print the tables and thresholds, and write the result files into `output`; return the tables."""
    texts, drawing = REPORTS[request["suite"]](cases, results)
    held = tables.judge(cases, results, request)
    texts = [*texts, thresholds.rows(held)] if held else texts
    facts = [
        {"name": case.name, "processes": case.processes, **case.facts, "rounds": results[case.name]} for case in cases
    ]
    turns = f", {request['steps']} steps each"
    text = write_files(output, texts, drawing, facts, request, seconds, threads="thread(s) a process", turns=turns)
    print(f"\n{text}\nWritten to {output}")
    return text
