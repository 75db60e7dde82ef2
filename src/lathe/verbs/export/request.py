"""What may be asked of an export, told before weights are touched."""

import inspect
from collections.abc import Mapping
from typing import Any

from lathe import export
from lathe.errors import require
from lathe.runs.inference import check_input_spec
from lathe.runs.rundir import RunDir

# Keys of the group that hold for every target.
SHARED = ("preprocess", "input_size", "split", "samples", "tolerance", "agreement", "max_drop")


def targets_of(group: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The nodes of a resolved `target` group that are targets, with their options.

    Raises:
        UserError: there is none.
    """
    found = {name: dict(node) for name, node in group.items() if name not in SHARED and node is not None}
    require(bool(found), f"target is empty: choose one of {', '.join(export.TARGETS)}.")
    return found


def taken(function: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that the function has arguments for."""
    return {name: value for name, value in options.items() if name in inspect.signature(function).parameters}


def check_request(cfg: Mapping[str, Any], run: RunDir) -> None:
    """What can be told before weights are touched.

    Raises:
        UserError: a size without the pictures to scale, several devices, a run without the checkpoint, or what
            `check_input_spec` raises.
    """
    check_input_spec(run.config, cfg["request"]["run"])  # before what an export would need
    target, devices = cfg["request"]["target"], cfg["trainer"]["devices"]
    run.checkpoint(cfg["request"]["checkpoint"], "checkpoint")
    require(
        target["preprocess"] or target["input_size"] is None,
        f"target.input_size={target['input_size']} scales pictures in the graph, which has no preprocessing with "
        "target.preprocess=false: leave one of them out.",
    )
    require(devices in (1, "auto"), f"trainer.devices={devices}: a run is exported in one process; leave it 1.")
