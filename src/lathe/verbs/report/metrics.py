"""The metrics of a report, and their directions."""

from collections import Counter
from collections.abc import Iterator, Sequence

from lathe.config.metric_names import is_cost, lower_is_better, on_test, recorded_direction, split_of, without_split
from lathe.errors import UserError, did_you_mean
from lathe.verbs.runs.reader import Run

ORDER = ("test", "val", "objective", None, "train", "cost")


def available(runs: Sequence[Run]) -> list[str]:
    """Return the metrics that any run has: test, val, objective, others, train, and cost last."""
    names = {name for run in runs if run.leaves for name in run.metrics}  # unreadable runs are in no table
    kinds = {name: "cost" if is_cost(name) else name if name == "objective" else split_of(name) for name in names}
    return sorted(names, key=lambda name: (ORDER.index(kinds[name]), name))


def choose_metrics(runs: Sequence[Run], asked: Sequence[str] | None) -> list[str]:
    """Return the requested metrics, or the one that selected the best checkpoints, on test if available."""
    names = available(runs)
    if not names:
        states = ", ".join(f"{count} {state}" for state, count in Counter(run.state for run in runs).items())
        why = dict.fromkeys(run.sentence for run in runs if run.sentence)
        raise UserError(f"runs: none has a metric yet ({states}). {' '.join(list(why)[:5])}".strip())
    for name in asked or ():
        if name not in names:
            hint = did_you_mean(name, names, f"they have {', '.join(names[:10])}.")
            raise UserError(f"metric={name}: no run has measured it; {hint}")
    return list(dict.fromkeys(asked or [next((name for name in _selecting(runs) if name in names), names[0])]))


def selected_by(runs: Sequence[Run]) -> str | None:
    """Return the metric that selected the best checkpoint of most runs, or that a sweep optimized."""
    names = [run.leaves.get("objective") or run.result.get("monitor") for run in runs if run.metrics]
    known = Counter(name for name in names if isinstance(name, str))
    return known.most_common(1)[0][0] if known else None


def direction(name: str, runs: Sequence[Run], asked: str | None) -> str:
    """Return max or min: as requested, as recorded by the runs, or guessed from the name."""
    return asked or _recorded(name, runs) or ("min" if lower_is_better(_meant(name, runs)) else "max")


def doubts(runs: Sequence[Run], wanted: Sequence[str], asked: Sequence[str] | None, way: str | None) -> Iterator[str]:
    """Yield a note for each metric or direction that was guessed."""
    if not asked and wanted[0] not in _selecting(runs):
        name = selected_by(runs)
        reason = "No run says by which metric it chose its best checkpoint"
        reason = reason if name is None else f"No result has {name}, by which the runs chose their best checkpoint"
        others = ", ".join([other for other in available(runs) if other != wanted[0]][:5])
        yield f"{reason}: the tables are of {wanted[0]}; metric= takes another ({others})."
    for name in wanted if way is None else ():
        best = direction(name, runs, None)
        turned = "direction=min" if best == "max" else "direction=max"
        if _recorded(name, runs) is None:
            more = "higher" if best == "max" else "lower"
            yield f"That {more} {name} is better was guessed from its name, no run says it: {turned} turns it round."
        elif len(_ways(name, runs)) > 1:
            yield f"The runs do not agree on whether more {name} is better: most say {best}; {turned} is the other way."


def _selecting(runs: Sequence[Run]) -> list[str]:
    name = selected_by(runs)
    return [] if name is None else [on_test(name), name, "objective"]


def _meant(name: str, runs: Sequence[Run]) -> str:
    return (selected_by(runs) or name) if name == "objective" else name


def _recorded(name: str, runs: Sequence[Run]) -> str | None:
    """Return the direction that most runs recorded; that of a cost is known."""
    if is_cost(name):
        return "min" if lower_is_better(name) else "max"
    ways = _ways(name, runs)
    return ways.most_common(1)[0][0] if ways else None


def _ways(name: str, runs: Sequence[Run]) -> Counter[str]:
    """Count the directions in results, or of the checkpoint callback if it monitors the metric."""
    name, found = _meant(name, runs), Counter[str]()
    for run in runs:
        mode, monitor = (run.leaves.get(f"callbacks.checkpoint.{key}") for key in ("mode", "monitor"))
        same = mode in ("min", "max") and without_split(str(monitor)) == without_split(name)
        way = recorded_direction(run.result, name) or (str(mode) if same else None)
        found.update([way] if way else [])
    return found
