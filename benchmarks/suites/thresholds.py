"""Limits of what suites measure: those of a request, and this project's own bars."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lathe.errors import did_you_mean, require
from suites.results import Facts, Results, Spread, table
from suites.tables import efficiency, forward_share, rest, state

AT_LEAST, AT_MOST = "at_least", "at_most"
Measured = tuple[str, Spread | None, str]  # a sentence, its value if measured, and the kind of its limit


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
    cells = [[one.full, str(one.measured or "not measured"), one.verdict] for one in thresholds]
    return table([heading, "measured", ""], cells)


def missed(thresholds: list[Threshold]) -> list[str]:
    """Return a message for each threshold that is not met or not measured."""
    return [
        f"missed: expected {one.full}, got {one.measured or 'no measurement'}." for one in thresholds if not one.met
    ]


def limits(request: Mapping[str, Any], facts: Facts) -> dict[str, float]:
    """Return the request's thresholds by name, or the suite's own.

    Raises:
        UserError: a threshold of a figure that this request does not measure, or `assert` without thresholds.
    """
    suite, given, possible = request["suite"], request.get("thresholds"), _measured(request, facts, Results())
    found = _own_limits(request, facts) if given is None else {str(name): float(limit) for name, limit in given.items()}
    for name in found:
        hint = did_you_mean(name, possible) if possible else "it has no thresholds."
        require(name in possible, f"thresholds.{name}: suite={suite} does not measure {name} here; {hint}")
    need = f"assert=true: suite={suite} has no default thresholds for this request. Set thresholds."
    require(bool(found) or not request.get("assert"), need)
    return found


def judge(request: Mapping[str, Any], facts: Facts, results: Results) -> list[Threshold]:
    """Return the request's thresholds, each with its measured value."""
    measured = _measured(request, facts, results)
    return [
        Threshold(sentence, spread, **{kind: limit})
        for name, limit in (request.get("thresholds") or {}).items()
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


def _measured(request: Mapping[str, Any], facts: Facts, results: Results) -> dict[str, list[Measured]]:
    """Return what a suite measures by the names of `thresholds`; without `results` the values are None."""
    suite, found = request["suite"], dict[str, list[Measured]]()
    if suite == "scaling":
        for name, about in facts.items():
            if about["processes"] > 1 and about["mode"] == "weak" and about["sync"]:
                entry = (f"{name}: efficiency", efficiency(results, facts, name), AT_LEAST)
                found.setdefault(str(about["processes"]), []).append(entry)
    if suite in ("parallel", "precision", "compile"):
        base, *others = facts
        for name in others:
            gain = results.ratio(name, base, "samples_per_s")
            found[name] = [(f"{name}: speed-up over {base}", gain, AT_LEAST)]
    if suite == "precision":
        for name in others:
            mine, theirs = results.spread(name, "peak"), results.spread(base, "peak")  # measured in the first round
            share = Spread([mine.median / theirs.median]) if mine and theirs else None
            found[f"{name}_memory"] = [(f"{name}: memory at the peak over {base}'s", share, AT_MOST)]
    if suite == "compile":
        regional = results.ratio("regional", "default", "cold_s")
        found["regional"] = [("regional: cold start over the whole net's", regional, AT_MOST)]
        found["warm"] = [
            (f"{name}: warm start over the cold one", results.spread(name, _warm_share), AT_MOST) for name in others
        ]
        found["anew"] = [
            (f"{name}: graph breaks and graphs made after the warm-up", results.spread(name, _late_graphs), AT_MOST)
            for name in others
        ]
    return found


def _warm_share(result: Mapping[str, Any]) -> float:
    return float(result["warm_s"] / result["cold_s"]) if result["cold_s"] else 0.0


def _late_graphs(result: Mapping[str, Any]) -> float:
    return float(result["breaks"] + result["anew"])


def scaling_bars(results: Results) -> list[Threshold]:
    """Return this project's bars for suite=scaling."""
    pair = "ddp, 2, weak"
    gain = results.ratio(pair, "ddp, 1, weak", "samples_per_s")
    bars = [
        Threshold(
            f"{name}, 1 process: step time over auto's",
            results.ratio(f"{name}, 1, weak", "auto, 1, weak", "step_ms"),
            at_most=1.05,
        )
        for name in ("ddp", "fsdp")
    ]
    return [
        *bars,
        Threshold(f"{pair}: efficiency", gain and Spread([value / 2 for value in gain.values]), at_least=0.90),
        Threshold(
            "the same over two processes that sum no gradients: what the machine leaves to ddp",
            results.ratio(pair, f"{pair}, no sync", "samples_per_s"),
        ),
    ]


def memory_bars(results: Results) -> list[Threshold]:
    """Return this project's bars for suite=memory."""
    deep, none = "auto, 1, sqrt", "auto, 1, none"
    kept = "parameters and optimizer of a process over the dense ones,"
    return [
        *(
            Threshold(f"{name}, 2: {kept}", results.ratio(f"{name}, 2", "auto, 1", state), at_most=0.60)
            for name in ("fsdp", "deepspeed_3")
        ),
        Threshold(
            "sqrt, 64 blocks: activations kept for backward over those of none,",
            results.ratio(deep, none, "activations"),
            at_most=0.35,
        ),
        Threshold(
            "sqrt, 64 blocks: all but parameters, gradients and optimizer at the peak, over that of none,",
            results.ratio(deep, none, rest),
            at_most=0.35,
        ),
    ]


def overhead_bars(results: Results) -> list[Threshold]:
    """Return this project's bars for suite=overhead: distillation may cost a forward pass."""
    share = results.spread("plain", forward_share)
    limit = {"prune": 1.03, "qat": 1.60, "distill": 1.05 + (share.median if share else 0.0)}
    return [
        Threshold(f"{name}: step over the plain one's,", results.ratio(name, "plain", "mean_step_ms"), at_most=most)
        for name, most in limit.items()
    ]


BARS = {"scaling": scaling_bars, "memory": memory_bars, "overhead": overhead_bars}
