"""The cost of a run: seconds and parameters of its result; bytes, MACs and latency of its receipt."""

from typing import Any

from lathe.runs.metric_names import COSTS, cost_of
from lathe.verbs.report.collect import Run
from lathe.verbs.report.groups import Group


def cost(run: Run) -> dict[str, float | None]:
    """Return the costs in a run's receipt."""
    return cost_of(run.receipt)


def mean_cost(group: Group) -> dict[str, float | None]:
    """Return the mean of each cost over the group's runs that have it."""
    told = [cost(run) for run in group.units.values()]
    known = {name: [one[name] for one in told if one[name] is not None] for name in COSTS}
    return {name: sum(filter(None, values)) / len(values) if values else None for name, values in known.items()}


def short(run: Run) -> dict[str, Any] | None:
    """Return the keys of a receipt that the page shows; None without a receipt."""
    if not run.receipt:
        return None
    kept = ("compression", "baseline", "ships", "bytes_share", "findings", "warnings")
    return {name: run.receipt.get(name) for name in kept}
