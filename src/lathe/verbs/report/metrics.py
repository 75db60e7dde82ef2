"""Which metrics a report is about, and which way is better."""

import re
from collections import Counter
from collections.abc import Sequence

from lathe.config.direction import lower_is_better
from lathe.errors import UserError, did_you_mean
from lathe.verbs.report.collect import Run


def available(runs: Sequence[Run]) -> list[str]:
    """The metrics that some run has measured: those of splits first, then objective, then what runs cost."""
    names = {name for run in runs for name in run.metrics}
    return sorted(names, key=lambda name: ("/" not in name, name != "objective", name))


def chosen(runs: Sequence[Run], asked: Sequence[str] | None) -> list[str]:
    """The metrics that were asked for, or the one by which the runs chose their best checkpoint, as it is on the test
    split if that was measured.

    Raises:
        UserError: no run has such a metric, or any at all.
    """
    names = available(runs)
    if not names:
        done = sum(run.state == "complete" for run in runs)
        raise UserError(
            f"runs: none of the {len(runs)} runs has a metric yet ({done} of them complete): wait for one, or continue "
            "one with python train.py resume=<run directory>."
        )
    for name in asked or ():
        if name not in names:
            hint = did_you_mean(name, names, f"they have {', '.join(names[:10])}.")
            raise UserError(f"metric={name}: no run has measured it; {hint}")
    if asked:
        return list(dict.fromkeys(asked))
    return [_usual(runs, names)]


def _usual(runs: Sequence[Run], names: Sequence[str]) -> str:
    name = _chosen_by(runs) or ""
    options = (re.sub("^val(?=[/_])", "test", name), name, "objective")
    return next((option for option in options if option in names), names[0])


def _chosen_by(runs: Sequence[Run]) -> str | None:
    """What most of the runs chose their best checkpoint by."""
    names = Counter(run.chosen_by for run in runs if run.metrics)
    return names.most_common(1)[0][0] if names else None


def direction(name: str, runs: Sequence[Run], asked: str | None) -> str:
    """max or min: as it was asked for, as the runs' own checkpoints take the same metric, or as its name says."""
    if asked is not None:
        return asked
    if name == "objective":
        name = _chosen_by(runs) or name
    for run in runs:
        mode = run.leaves.get("callbacks.checkpoint.mode")
        monitor = run.leaves.get("callbacks.checkpoint.monitor")
        if mode in ("min", "max") and str(monitor).partition("/")[2] == name.partition("/")[2] != "":
            return str(mode)
    return "min" if lower_is_better(name) else "max"
