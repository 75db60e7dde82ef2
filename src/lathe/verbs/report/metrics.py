"""The metrics of a report, and their directions."""

from collections import Counter
from collections.abc import Iterator, Sequence

from lathe.config.metric_split import split_of
from lathe.config.sweep_direction import lower_is_better
from lathe.errors import UserError, did_you_mean
from lathe.runs.metric_names import is_cost, on_test, recorded_direction, without_split
from lathe.verbs.report.collect import Run
from lathe.verbs.runs.table import NAMED

_ORDER = ("test", "val", "objective", None, "train", "cost")


def available(runs: Sequence[Run]) -> list[str]:
    """Return the metrics that any run has: test, val, objective, others, train, and cost last."""
    names = {name for run in runs if run.leaves for name in run.metrics}  # unreadable runs are in no table
    return sorted(names, key=lambda name: (_ORDER.index(_kind(name)), name))


def _kind(name: str) -> str | None:
    return "cost" if is_cost(name) else name if name == "objective" else split_of(name)


def chosen(runs: Sequence[Run], asked: Sequence[str] | None) -> list[str]:
    """Return the requested metrics, or the one that selected the best checkpoints, on test if available."""
    names = available(runs)
    if not names:
        raise _why_none(runs)
    for name in asked or ():
        if name not in names:
            hint = did_you_mean(name, names, f"they have {', '.join(names[:10])}.")
            raise UserError(f"metric={name}: no run has measured it; {hint}")
    if asked:
        return list(dict.fromkeys(asked))
    return [next((name for name in _options(runs) if name in names), names[0])]


def _why_none(runs: Sequence[Run]) -> UserError:
    """Return the error for runs without metrics: why they failed, and whether others are in progress."""
    none = f"none of the {len(runs)} runs has a metric" if len(runs) > 1 else "the only run has no metric"
    lost = [
        run.sentence.rstrip(".") for run in runs if (run.state in ("failed", "gone") or not run.leaves) and run.sentence
    ]
    told = "; ".join([*lost[:NAMED], *([f"and {len(lost) - NAMED} more"] if len(lost) > NAMED else [])])
    if lost and not any(run.state in ("running", "unfinished") for run in runs):
        return UserError(f"runs: {none}: {told}.")
    done = sum(run.state == "complete" for run in runs)
    others = f"; {told}" if told else ""
    return UserError(
        f"runs: {none} yet ({done} of them complete): wait for one, or continue one with python train.py "
        f"resume=<run directory>{others}."
    )


def _options(runs: Sequence[Run]) -> list[str]:
    name = chosen_by(runs)
    return [] if name is None else [on_test(name), name, "objective"]


def chosen_by(runs: Sequence[Run]) -> str | None:
    """Return the metric that selected the best checkpoint of most runs."""
    names = Counter(run.chosen_by for run in runs if run.metrics and run.chosen_by is not None)
    return names.most_common(1)[0][0] if names else None


def direction(name: str, runs: Sequence[Run], asked: str | None) -> str:
    """Return max or min: as requested, as recorded by the runs, or guessed from the name."""
    return asked or _told(name, runs) or ("min" if lower_is_better(_meant(name, runs)) else "max")


def doubts(runs: Sequence[Run], wanted: Sequence[str], metric: Sequence[str] | None, way: str | None) -> Iterator[str]:
    """Yield a note for each metric or direction that was guessed."""
    if not metric and wanted[0] not in _options(runs):
        name = chosen_by(runs)
        reason = "No run says by which metric it chose its best checkpoint"
        reason = reason if name is None else f"No result has {name}, by which the runs chose their best checkpoint"
        others = [other for other in available(runs) if other != wanted[0]][:5]
        yield f"{reason}: the tables are of {wanted[0]}; metric= takes another ({', '.join(others)})."
    for name in wanted if way is None else ():
        best = direction(name, runs, None)
        turned = "direction=min" if best == "max" else "direction=max"
        if _told(name, runs) is None:
            more = "higher" if best == "max" else "lower"
            yield f"That {more} {name} is better was guessed from its name, no run says it: {turned} turns it round."
        elif len(_ways(name, runs)) > 1:
            yield f"The runs do not agree on whether more {name} is better: most say {best}; {turned} is the other way."


def _told(name: str, runs: Sequence[Run]) -> str | None:
    """Return the direction that most runs recorded; that of a cost is known."""
    if is_cost(name):
        return "min" if lower_is_better(name) else "max"
    ways = _ways(name, runs)
    return ways.most_common(1)[0][0] if ways else None


def _ways(name: str, runs: Sequence[Run]) -> Counter[str]:
    name = _meant(name, runs)
    told = (recorded_direction(run.result, name) or _configured(name, run) for run in runs)
    return Counter(way for way in told if way is not None)


def _meant(name: str, runs: Sequence[Run]) -> str:
    return (chosen_by(runs) or name) if name == "objective" else name


def _configured(name: str, run: Run) -> str | None:
    """Return the mode of the run's checkpoint callback if it is set, and its monitor is the same metric."""
    mode, monitor = (run.leaves.get(f"callbacks.checkpoint.{key}") for key in ("mode", "monitor"))
    return str(mode) if mode in ("min", "max") and without_split(str(monitor)) == without_split(name) else None
