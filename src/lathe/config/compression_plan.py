"""The methods of compression of a run, their order and their stages. Imports no torch."""

from typing import Any

from lathe.errors import did_you_mean, require

# Later kinds act on the result of earlier ones: masks on the remaining channels, integers on masked weights.
KINDS = ("distillation", "structure", "masks", "quantization", "after")
SETTINGS = ("stages", "receipt")  # keys of the group that are not methods


def methods(compression: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The methods of a resolved `compression` group by name, in their order."""
    return {name: node for name, node in compression.items() if name not in SETTINGS and node is not None}


def windows(compression: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """The share of the run in which each method acts, as (begin, end).

    `compression.stages` divides the run into equal shares, one after the other, each of a method or a list of methods.
    Without it all methods act during the whole run.
    """
    stages = compression.get("stages")
    if stages is None:
        return dict.fromkeys(methods(compression), (0.0, 1.0))
    return {
        name: (number / len(stages), (number + 1) / len(stages))
        for number, stage in enumerate(stages)
        for name in (stage if isinstance(stage, list) else [stage])
    }


def check_stages(compression: dict[str, Any]) -> None:
    """Raise UserError unless `compression.stages` names each method of the run once, and in their order."""
    nodes, stages = methods(compression), compression.get("stages")
    if stages is None:
        return
    typed = f"compression.stages={stages}"
    require(isinstance(stages, list) and bool(stages), f"{typed}: give a list of methods, or null.")
    named = [name for stage in stages for name in (stage if isinstance(stage, list) else [stage])]
    for name in named:
        require(name in nodes, f"{typed} names {name}, which the run does not have; {did_you_mean(name, nodes)}")
        require(named.count(name) == 1, f"{typed} names {name} twice: a method has one stage.")
    missing = [name for name in nodes if name not in named]
    require(not missing, f"{typed} leaves out {', '.join(missing)}: give each method of the run a stage.")
    begins = windows(compression)
    starts = [begins[name][0] for name, node in nodes.items() if node.get("kind") != "distillation"]
    require(starts == sorted(starts), f"{typed} has a later method in an earlier stage. Order: {', '.join(nodes)}.")
