"""Validate an export request before weights are read."""

import inspect
from collections.abc import Mapping
from typing import Any

from lathe import export
from lathe.errors import require
from lathe.runs.inference import check_input_spec
from lathe.runs.rundir import RunDir

# keys of the group that apply to every target
SHARED = ("preprocess", "input_size", "split", "samples", "tolerance", "agreement", "max_drop")


def targets_of(group: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the targets of a resolved `target` group, with their options."""
    found = {name: dict(node) for name, node in group.items() if name not in SHARED and node is not None}
    require(bool(found), f"target is empty: choose one of {', '.join(export.TARGETS)}.")
    return found


def taken(function: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the function has parameters for."""
    return {name: value for name, value in options.items() if name in inspect.signature(function).parameters}


def check_request(cfg: Mapping[str, Any], run: RunDir) -> None:
    """Raise UserError for an invalid request."""
    check_input_spec(run.config, cfg["request"]["run"])  # before the checks of the export
    target, devices = cfg["request"]["target"], cfg["trainer"]["devices"]
    run.checkpoint(cfg["request"]["checkpoint"], "checkpoint")
    require(
        target["preprocess"] or target["input_size"] is None,
        f"target.input_size={target['input_size']} scales pictures in the graph, which has no preprocessing with "
        "target.preprocess=false: leave one of them out.",
    )
    require(devices in (1, "auto"), f"trainer.devices={devices}: a run is exported in one process; leave it 1.")
