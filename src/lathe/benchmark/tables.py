"""Tables of the suites that compare trainings: precision, compile, parallel."""

from collections.abc import Sequence
from typing import Any

from lathe.benchmark.cases import Case
from lathe.benchmark.spread import Results, Spread, rate, ratio, spread, table
from lathe.benchmark.thresholds import Threshold
from lathe.measure import plot

MIB = 2**20
Written = tuple[list[str], str]


def precision(cases: Sequence[Case], results: Results) -> Written:
    base = cases[0].name
    rows, heights = [], dict[str, dict[str, float]]()
    for case in cases:
        step = spread(results, case.name, "step_ms")
        if step is None:
            rows.append([case.name, error_of(results, case), *[""] * 7])
            continue
        cells = [case.name, step.short, _over(results, case.name, base), _speed(results, case.name, base)]
        rows.append([*cells, *_common(results, case.name)])
        heights[case.name] = {"step, ms": step.median}
    head = ["precision", "step, ms", f"step over {base}'s", "speed-up", *_common_head(results)]
    return [table(head, rows)], plot.stacks("Time of a step", "ms", heights)


def parallel(cases: Sequence[Case], results: Results) -> Written:
    base = cases[0].name
    rows, heights = [], dict[str, dict[str, float]]()
    for case in cases:
        facts, speed = case.facts, spread(results, case.name, "samples_per_s")
        warm = f", warmed up for {facts['warmup']:.0%} of the run" if facts["warmup"] else ""
        first = [case.name, str(case.processes), str(facts["batch_size"]), f"{facts['lr']:g}{warm}"]
        if speed is None:
            rows.append([*first, error_of(results, case), *[""] * 6])
            continue
        rows.append([*first, _speed(results, case.name, base), *_common(results, case.name)])
        heights[case.name] = {"samples/s": speed.median}
    head = ["row", "devices", "global batch", "learning rate", f"speed-up over {base}", *_common_head(results)]
    return [table(head, rows)], plot.stacks("Throughput", "samples/s", heights)


def compiled(cases: Sequence[Case], results: Results) -> Written:
    rows, heights = [], dict[str, dict[str, float]]()
    for case in cases:
        name = case.name
        cold, warm = spread(results, name, "cold_s"), spread(results, name, "warm_s")
        step, peak = spread(results, name, "step_ms"), spread(results, name, "peak")
        breaks, anew = spread(results, name, "breaks"), spread(results, name, "anew")
        if cold is None or warm is None or step is None or breaks is None or anew is None:
            rows.append([name, error_of(results, case), *[""] * 7])
            continue
        rows.append(
            [
                name,
                cold.short,
                warm.short,
                step.short,
                _speed(results, name, "none"),
                _number(spread(results, name, "epoch_s"), ".2f"),
                f"{peak.median / MIB:,.0f}" if peak else "",
                f"{breaks.high:.0f}",
                f"{anew.high:.0f}",
            ]
        )
        heights[name] = {"cold, s": cold.median, "warm, s": warm.median}
    head = [
        "compile",
        "cold, s",
        "warm, s",
        "step, ms",
        "speed-up over none",
        "epoch, s",
        "peak, MiB",
        "graph breaks",
        "graphs made after the warm-up",
    ]
    text = (
        "Cold and warm: what the first steps took beyond their own time, with an empty folder of compiled code and in "
        "a fresh process with what the first has left. Step and memory: of the second process, behind these steps; on "
        "a CPU the memory is the whole process's, libraries and all.\n"
    )
    return [table(head, rows), text], plot.stacks("Start of a compiled run", "s", heights)


def _common_head(results: Results) -> list[str]:
    names = sorted({str(r["metric"]) for found in results.values() for r in found if r.get("metric")})
    return ["samples/s", "epoch, s", "peak, MiB", "updates", ", ".join(names) or "validation"]


def _common(results: Results, name: str) -> list[str]:
    first = results[name][0]
    reached, updates, peak = first.get("reached"), first.get("updates"), first.get("peak")
    return [
        _number(spread(results, name, "samples_per_s"), ",.0f"),
        _number(spread(results, name, "epoch_s"), ".2f"),
        "" if peak is None else f"{peak / MIB:,.1f}",
        "" if updates is None else str(updates),
        "" if "metric" not in first else "not a number" if reached is None else f"{reached:.4f}",
    ]


def _number(found: Spread | None, form: str) -> str:
    return f"{found.median:{form}}" if found else ""


def _step(result: dict[str, Any]) -> float:
    return float(result["step_ms"])


def _over(results: Results, name: str, base: str) -> str:
    found = ratio(results, name, base, _step)
    return str(found) if found and name != base else ""


def _speed(results: Results, name: str, base: str) -> str:
    found = ratio(results, name, base, rate)
    return str(found) if found and name != base else ""


def error_of(results: Results, case: Case) -> str:
    """Return the reason why a case has no figures."""
    return next((r["error"] for r in results.get(case.name, []) if "error" in r), "not measured")


def efficiency(results: Results, name: str, strategy: str, processes: int) -> tuple[Spread | None, Spread | None]:
    """Return the speed-up over one process (of the strategy, else of auto), and it divided by `processes`."""
    one = f"{strategy}, 1, weak"
    gain = ratio(results, name, one if one in results else "auto, 1, weak", rate)
    return gain, Spread([value / processes for value in gain.values]) if gain else None


def judge(cases: Sequence[Case], results: Results, request: dict[str, Any]) -> list[Threshold]:
    """Return the request's thresholds, each with its measured value."""
    return [
        held
        for name, limit in (request.get("thresholds") or {}).items()
        for held in JUDGES[request["suite"]](name, limit, cases, results)
    ]


def _judge_scaling(name: str, limit: float, cases: Sequence[Case], results: Results) -> list[Threshold]:
    return [
        Threshold(
            f"{case.name}: efficiency",
            efficiency(results, case.name, case.facts["strategy"], case.processes)[1],
            at_least=limit,
        )
        for case in cases
        if case.processes == int(name) and case.facts["mode"] == "weak" and case.sync
    ]


def _judge_parallel(name: str, limit: float, cases: Sequence[Case], results: Results) -> list[Threshold]:
    gain = ratio(results, name, cases[0].name, rate)
    return [Threshold(f"{name}: speed-up over {cases[0].name}", gain, at_least=limit)]


def _judge_precision(name: str, limit: float, cases: Sequence[Case], results: Results) -> list[Threshold]:
    base = cases[0].name
    if not name.endswith("_memory"):
        return _judge_parallel(name, limit, cases, results)
    name = name.removesuffix("_memory")
    mine, theirs = spread(results, name, "peak"), spread(results, base, "peak")
    share = Spread([mine.median / theirs.median]) if mine and theirs else None
    return [Threshold(f"{name}: memory at the peak over {base}'s", share, at_most=limit)]


def _judge_compile(name: str, limit: float, cases: Sequence[Case], results: Results) -> list[Threshold]:
    if name == "regional":
        share = ratio(
            {key: [{"s": r["cold_s"]} if "cold_s" in r else r for r in found] for key, found in results.items()},
            "regional",
            "default",
            lambda r: float(r["s"]),
        )
        return [Threshold("regional: cold start over the whole net's", share, at_most=limit)]
    if name not in ("warm", "anew"):
        return _judge_parallel(name, limit, cases, results)
    held = []
    for case in (case for case in cases if case.name != "none"):
        found = [r for r in results.get(case.name, []) if "error" not in r]
        if name == "warm":
            values = [r["warm_s"] / r["cold_s"] for r in found if r["cold_s"]]
            what = "warm start over the cold one"
        else:
            values = [float(r["breaks"] + r["anew"]) for r in found]
            what = "graph breaks and graphs made after the warm-up"
        held.append(Threshold(f"{case.name}: {what}", Spread(values) if values else None, at_most=limit))
    return held


JUDGES = {
    "scaling": _judge_scaling,
    "parallel": _judge_parallel,
    "precision": _judge_precision,
    "compile": _judge_compile,
}
