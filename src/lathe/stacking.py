"""The methods of compression of a run: made from the configuration, and brought to their end once training is over."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

from lathe import receipt, score
from lathe.build import make, make_task
from lathe.callbacks import AtomicCheckpointIO, Compression
from lathe.checkpoints import read_checkpoint, restore
from lathe.compression.structure import structure_of
from lathe.rundir import RunDir
from lathe.stages import methods, windows


def make_methods(cfg: dict[str, Any]) -> list[Compression]:
    """The callbacks that `compression` lists, in their order, each with its share of the run.

    Raises:
        UserError: one can't be built.
    """
    group = cfg.get("compression") or {}
    shares = windows(group)
    made: list[Compression] = []
    for name, node in methods(group).items():
        method: Compression = make({key: value for key, value in node.items() if key != "kind"}, f"compression.{name}")
        method.window = shares[name]
        if hasattr(method, "open_run"):
            method.open_run = partial(score.open_net, key=f"compression.{name}.teacher")
        made.append(method)
    return made


def finalise(cfg: dict[str, Any], best: Path, made: list[Compression]) -> bool:
    """Lets methods that act on the best weights do so, and writes best.ckpt anew, as weights with their structure, if one did.

    For one process. Returns whether the checkpoint holds a net that was changed after training, now or by an earlier call.
    """
    state = read_checkpoint(best)
    if state.get("finalised", False):
        return True
    late = [method for method in made if type(method).finalise is not Compression.finalise]
    if not late:
        return False
    task = make_task(cfg, train=False)
    restore(task.net, state, str(best))
    task.net.eval()
    datamodule = score.open_data(cfg)
    changes = [method.finalise(task.net, datamodule) for method in late]
    if not any(changes):
        return False
    write_weights(best, task.net, state)
    return True


def write_weights(path: Path, net: Any, state: dict[str, Any]) -> None:
    """Writes a checkpoint of `net` as it is: weights and structure, at the step of `state`, without what goes on training."""
    kept: dict[str, Any] = {name: state[name] for name in ("epoch", "global_step", "pytorch-lightning_version") if name in state}
    weights = {name: value.detach().clone().contiguous() for name, value in net.state_dict().items()}
    AtomicCheckpointIO().save_checkpoint({**kept, "state_dict": weights, "structure": structure_of(net), "finalised": True}, path)


def write_receipt(run: RunDir, cfg: dict[str, Any]) -> None:
    """Measures what compression has made, beside the run that this one started from. The run itself is complete: a receipt that fails is
    told, and can be asked for again."""
    try:
        receipt.write(run, cfg, None, cfg["compression"]["receipt"])
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        warnings.warn(
            f"The run is complete, but its receipt failed ({type(error).__name__}: {words}): python scripts/receipt.py run={run.path}",
            stacklevel=2,
        )
