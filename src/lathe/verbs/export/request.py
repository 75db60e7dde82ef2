"""What may be asked of an export, told before weights are touched."""

import inspect
from collections.abc import Mapping
from typing import Any

from lathe import export
from lathe.errors import did_you_mean, require
from lathe.runs.rundir import RunDir

# Keys of the group that hold for every target.
SHARED = ("preprocess", "input_size", "split", "samples", "tolerance", "agreement", "max_drop")


def targets_of(group: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The nodes of a resolved `target` group that are targets, with their options.

    Raises:
        UserError: there is none, or one of another name, or an option that a target does not have.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, node in group.items():
        if name in SHARED or node is None:
            continue
        known = (*SHARED, *export.TARGETS)
        require(isinstance(node, Mapping), f"target.{name}={node}: there is no such key; {did_you_mean(name, known)}")
        require(name in export.TARGETS, f"target={name} is unknown; {did_you_mean(name, export.TARGETS)}")
        found[name] = dict(node)
    require(bool(found), f"target is empty: choose one of {', '.join(export.TARGETS)}.")
    for name, options in found.items():
        check_options(name, options)
    return found


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Holds options against the arguments of the target's `export`; `integers` is the verb's own, for targets that take
    both.

    Raises:
        UserError: there is no such option, or `integers` is neither true, false nor null.
    """
    target = export.get(name)
    takes = options_of(target) + ["integers"] * (target.integers is None)
    for option, value in options.items():
        hint = did_you_mean(option, takes) or "it has no options"
        require(option in takes, f"target.{name}.{option}={value}: {name} has no such option; {hint}")
    value = options.get("integers")
    require(value is None or isinstance(value, bool), f"target.{name}.integers={value}: choose true, false or null.")


def options_of(target: export.Target) -> list[str]:
    """Names of the options that the target's `export` takes, behind the net, its example and the path."""
    return [name for name in list(inspect.signature(target.export).parameters)[3:] if name not in export.GIVEN]


def taken(function: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that the function has arguments for."""
    return {name: value for name, value in options.items() if name in inspect.signature(function).parameters}


def check_request(cfg: Mapping[str, Any], run: RunDir) -> None:
    """What can be told before weights are touched.

    Raises:
        UserError: a value that can't be, several devices, or a run without the checkpoint.
    """
    request, target = cfg["request"], cfg["request"]["target"]
    run.checkpoint(request["checkpoint"])
    require(isinstance(target["preprocess"], bool), f"target.preprocess={target['preprocess']}: choose true or false.")
    require(
        target["preprocess"] or target["input_size"] is None,
        f"target.input_size={target['input_size']} scales pictures in the graph, which has no preprocessing with "
        "target.preprocess=false: leave one of them out.",
    )
    require(target["split"] in ("test", "val"), f"target.split={target['split']}: choose test or val.")
    for key, value in (("target.samples", target["samples"]), ("batch_size", request["batch_size"])):
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        require(value is None or whole, f"{key}={value}: give a whole number from 1, or null.")
    tolerance, agreement, drop = target["tolerance"], target["agreement"], target["max_drop"]
    require(
        tolerance is None or (_number(tolerance) and tolerance > 0),
        f"target.tolerance={tolerance}: give a share above 0, or null.",
    )
    require(
        agreement is None or (_number(agreement) and 0 <= agreement <= 1),
        f"target.agreement={agreement}: give a share from 0 to 1, or null.",
    )
    require(drop is None or (_number(drop) and drop >= 0), f"target.max_drop={drop}: give a share from 0, or null.")
    devices = cfg["trainer"]["devices"]
    require(devices in (1, "auto"), f"trainer.devices={devices}: a run is exported in one process; leave it 1.")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
