"""Which methods of compression act together in a run, in which order, and when. Imports no torch: it answers at
once.
"""

from typing import Any

from lathe.errors import did_you_mean, require

# Later kinds act on what earlier ones leave: integers are made of masked weights, masks lie on the channels that
# remain.
KINDS = ("distillation", "structure", "masks", "quantization", "after")
RECEIPTS = ("quick", "full", "none")
SETTINGS = ("stages", "receipt")  # keys of the group that are no methods


def methods(compression: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The nodes of a resolved `compression` group that are methods, in their order."""
    return {name: node for name, node in compression.items() if name not in SETTINGS and node is not None}


def check_compression(cfg: dict[str, Any]) -> None:
    """The methods have to stand in an order that works, at most one of a kind that excludes others, under a strategy
    that takes them.

    Raises:
        UserError: they don't; the sentence names the key and the way out.
    """
    compression = cfg.get("compression") or {}
    nodes, receipt = methods(compression), compression.get("receipt", "none")
    require(receipt in RECEIPTS, f"compression.receipt={receipt!r}: choose one of {', '.join(RECEIPTS)}.")
    for name, node in nodes.items():
        chosen = isinstance(node, dict) and "_target_" in node
        require(
            chosen,
            f"compression.{name} sets options of a method that the run does not have: add {name} to compression, or "
            f"set compression.{name}=null.",
        )
        kind = node.get("kind")
        require(kind in KINDS, f"compression.{name}.kind={kind!r}: choose one of {', '.join(KINDS)}.")
    names = list(nodes)
    ordered = sorted(names, key=lambda name: KINDS.index(nodes[name]["kind"]))
    require(
        names == ordered,
        f"compression=[{','.join(names)}] is out of order, integers are made of masked weights and masks lie on the "
        f"channels that remain: write compression=[{','.join(ordered)}].",
    )
    for kind in ("structure", "masks", "quantization"):
        same = [name for name in names if nodes[name]["kind"] == kind]
        require(
            len(same) <= 1,
            f"compression=[{','.join(names)}] has {' and '.join(same)}, which decide over the same {_what(kind)}: "
            "keep one.",
        )
    cutting = [name for name in names if nodes[name]["kind"] in ("structure", "masks")]
    require(
        not cfg.get("freeze") or not cutting,
        f"freeze={cfg.get('freeze')} keeps parameters as they are, and compression={','.join(cutting)} would cut them: "
        "leave one of them out.",
    )
    both = {"quantization", "after"} <= {node["kind"] for node in nodes.values()}
    require(not both, f"compression=[{','.join(names)}] quantizes in training and again after it: keep one of them.")
    trainer, callbacks = cfg.get("trainer", {}), cfg.get("callbacks", {"checkpoint": {}})  # compress.py has neither
    kept = trainer.get("enable_checkpointing", True) and callbacks.get("checkpoint") is not None
    late = [name for name in names if nodes[name]["kind"] == "after" or nodes[name].get("mode") == "gradual"]
    require(
        kept or not late or bool(trainer.get("fast_dev_run")),
        f"compression={','.join(late)} acts on best.ckpt after training, and this run keeps none: set "
        "trainer.enable_checkpointing=true and keep callbacks.checkpoint.",
    )
    strategy, takes = str(cfg["strategy"].get("_target_")).rpartition(".")[2], cfg["strategy"].get("compressions")
    for name in names:
        require(
            takes is None or nodes[name]["kind"] in takes,
            f"compression={name}: strategy {strategy} takes {_listed(takes)} of compression; choose another strategy, "
            "such as ddp or auto.",
        )
    windows(compression)


def _what(kind: str) -> str:
    return {"structure": "channels", "masks": "weights", "quantization": "layers"}[kind]


def _listed(kinds: list[str] | None) -> str:
    return " and ".join(kinds or []) if kinds else "no kind"


def windows(compression: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """For each method, the share of the run's optimizer steps in which it acts, by `compression.stages`: null for all
    of them together, else a list whose items, a method's name or a list of names, take equal shares of the run one
    after the other.

    Raises:
        UserError: a stage names no method of the run, or a method has no stage or two, or methods are against their
            order.
    """
    names, stages = list(methods(compression)), compression.get("stages")
    if stages is None:
        return dict.fromkeys(names, (0.0, 1.0))
    require(
        isinstance(stages, list) and bool(stages), f"compression.stages={stages!r}: give a list of methods, or null."
    )
    found: dict[str, tuple[float, float]] = {}
    for index, stage in enumerate(stages):
        for name in stage if isinstance(stage, list) else [stage]:
            require(
                name in names,
                f"compression.stages names {name}, which the run does not have; {did_you_mean(name, names)}",
            )
            require(name not in found, f"compression.stages names {name} twice: a method has one stage.")
            found[name] = (index / len(stages), (index + 1) / len(stages))
    missing = [name for name in names if name not in found]
    require(not missing, f"compression.stages leaves out {', '.join(missing)}: give each method of the run a stage.")
    starts = [found[name][0] for name in names if methods(compression)[name].get("kind") != "distillation"]
    require(
        starts == sorted(starts),
        f"compression.stages={stages} has a later method in an earlier stage: keep the order {', '.join(names)}.",
    )
    return found
