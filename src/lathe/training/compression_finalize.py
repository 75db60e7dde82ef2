"""The last steps of compression after training: methods that change the best weights, and the receipt."""

import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule

from lathe.callbacks import AtomicCheckpointIO
from lathe.compression import Compression
from lathe.compression.structure import structure_of
from lathe.runs import inference
from lathe.runs.build import make_task
from lathe.runs.checkpoints import read_checkpoint, restore
from lathe.runs.rundir import RunDir, run_command
from lathe.tasks.core import core_of
from lathe.training.trainer_setup import configure_logging

# kept in a checkpoint of weights; `report` has the results of methods, in case the run is interrupted after them
KEPT = ("epoch", "global_step", "pytorch-lightning_version", "report")
OF_TRAINING = ("state_dict", "loops", "callbacks", "optimizer_states", "lr_schedulers", "task", "gradients", "digests")


def finalize_compression(cfg: dict[str, Any], best: Path, compression: list[Compression]) -> bool:
    """Apply the methods that act on the best weights, and replace best.ckpt by the resulting weights and structure.

    Runs in one process. Returns whether the checkpoint has a net that was changed after training, now or before.
    """
    state = read_checkpoint(best)
    if state.get("finalised", False):
        return True
    late = [method for method in compression if type(method).finalise is not Compression.finalise]
    if not late:
        return False
    task = make_task(cfg, train=False)
    restore(task.net, state, str(best), finite=False)  # the result reports what is not finite
    task.eval()
    datamodule = inference.open_data(cfg, task)
    changes = [method.finalise(task.core, datamodule) for method in late]
    if not any(changes):
        return False
    report = {name: value for method in late for name, value in method.report().items()}
    write_weights(best, task.net, {**state, "report": report})
    return True


def write_weights(path: Path, net: Any, state: dict[str, Any]) -> None:
    """Write the weights and structure of `net` as a checkpoint at the step of `state`, without optimizer and loops."""
    entries: dict[str, Any] = {name: state[name] for name in KEPT if name in state}
    if isinstance(net, LightningModule):  # with what its own on_save_checkpoint and save_hyperparameters keep
        entries = {name: value for name, value in state.items() if name not in OF_TRAINING}
    weights = {name: value.detach().clone().contiguous() for name, value in net.state_dict().items()}
    AtomicCheckpointIO().save_checkpoint(
        {**entries, "state_dict": weights, "structure": structure_of(core_of(net)), "finalised": True}, path
    )


def write_receipt(run: RunDir, cfg: dict[str, Any]) -> None:
    """Measure the compressed net next to the run that it started from; warn if that fails."""
    from lathe import receipt  # which measures: not needed without compression

    try:
        receipt.write(run, cfg, None, cfg["compression"]["receipt"])
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        warnings.warn(
            f"The run is complete, but its receipt failed ({type(error).__name__}: {reason}): "
            + run_command("scripts/receipt.py", "run", run.path),
            stacklevel=2,
        )


def complete_receipt(cfg: dict[str, Any]) -> None:
    """Write the receipt of a complete run that was interrupted before it."""
    configure_logging()
    write_receipt(RunDir(cfg["paths"]["run_dir"]), cfg)
