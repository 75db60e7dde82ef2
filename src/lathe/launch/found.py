"""The run that a command continues or joins: the one that it names, or one of its configuration or its launch."""

from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from lathe.config.composed import changes
from lathe.errors import require
from lathe.launch.continued import at_home, continued, owes_receipt
from lathe.launch.nodes import Nodes
from lathe.launch.outer import Outer
from lathe.runs import find
from lathe.runs.places import shown
from lathe.runs.rundir import NOT_THE_EXPERIMENT, RunDir, open_run


def find_run(cfg: dict[str, Any], outer: Outer | None, nodes: Nodes) -> tuple[RunDir | None, dict[str, Any]]:
    """The run to continue or to join, if there is one, and the configuration to go by.

    Raises:
        UserError: `cfg` names runs in two ways, or one that can't be continued so.
    """
    log_dir, resume = Path(cfg["paths"]["log_dir"]), cfg["resume"]
    found = None
    if resume == "auto":
        require(
            nodes.launch_id is None,
            f"resume=auto and launch.id={nodes.launch_id} both look for a run: leave resume out.",
        )
        found = find.find_unfinished(log_dir, cfg) or _complete_already(log_dir, cfg)
        if found is None and HydraConfig.get().mode != RunMode.MULTIRUN:
            _tell_unlike(log_dir, cfg)
    elif resume is not None:
        run = open_run(resume, "resume")
        if run.complete:
            _ = run.result  # which says here what no run has left
        else:
            _tell_beginning(run)
        return run, continued(run, cfg)
    elif nodes.launch_id is not None:
        found = find.find_launch(log_dir, str(cfg["name"]), nodes.launch_id, unfinished=False)
        changed = changes(found.config, cfg, str(found.path), NOT_THE_EXPERIMENT) if found else []
        if found and changed:
            require(
                not found.complete,
                f"launch.id={nodes.launch_id} is the name of {found.path}, which is complete: choose another.",
            )
            print(f"{found.path} keeps its own configuration; this command differs in {'; '.join(changed)}")
    elif outer is not None and outer.restarted:
        found = find.find_launch(log_dir, str(cfg["name"]), outer.launch_id)
    if found is None:
        return None, cfg
    if nodes.several and not found.complete and not found.last.exists():
        print(f"Joining {found.path}")
    elif not found.complete:
        _tell_beginning(found)
    return found, at_home(found, found.config, cfg)


def _tell_beginning(run: RunDir) -> None:
    if run.begun and not run.last.exists():
        print(f"{run.path} has no checkpoints/last.ckpt to continue from: it begins again, at step 0.")


def _tell_unlike(log_dir: Path, cfg: dict[str, Any]) -> None:
    unlike = find.find_unlike(log_dir, cfg)
    if unlike is not None:
        run, keys = unlike
        named = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more keys" if len(keys) > 3 else "")
        print(
            f"resume=auto: no unfinished run has this configuration; {shown(run.path)} differs in {named}. A new run "
            "begins."
        )


def _complete_already(log_dir: Path, cfg: dict[str, Any]) -> RunDir | None:
    """A sweep that is started again keeps its finished jobs: a second run of the same seed would count twice in an
    average.
    """
    found = find.find_complete(log_dir, cfg)
    if found is None or HydraConfig.get().mode == RunMode.MULTIRUN or owes_receipt(found, cfg):
        return found
    print(
        f"{found.path} is a complete run of this configuration; resume=auto starts another (under -m it keeps the "
        "complete one)."
    )
    return None
