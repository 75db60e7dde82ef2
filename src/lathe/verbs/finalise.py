"""The end of compression: what its methods still do once training is over, and the receipt."""

import math
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lathe import export, receipt
from lathe.callbacks import AtomicCheckpointIO, Compression
from lathe.compression.masks.parameters import zero_share
from lathe.compression.structure import structure_of
from lathe.config.compression_plan import methods
from lathe.runs import score
from lathe.runs.build import make_task
from lathe.runs.checkpoints import read_checkpoint, restore
from lathe.runs.rundir import RunDir
from lathe.runs.trainer import quiet
from lathe.runs.typed import run_command

# of a checkpoint, beside its weights; `report` is what methods that acted after training told, for a run whose end was
# interrupted
KEPT = ("epoch", "global_step", "pytorch-lightning_version", "report")


def finalise(cfg: dict[str, Any], best: Path, made: list[Compression]) -> bool:
    """Lets methods that act on the best weights do so, and writes best.ckpt anew, as weights with their structure, if
    one did.

    For one process. Returns whether the checkpoint holds a net that was changed after training, now or by an earlier
    call.
    """
    state = read_checkpoint(best)
    if state.get("finalised", False):
        return True
    late = [method for method in made if type(method).finalise is not Compression.finalise]
    if not late:
        return False
    task = make_task(cfg, train=False)
    restore(task.net, state, str(best), finite=False)  # told with the result
    task.net.eval()
    datamodule = score.open_data(cfg, task)
    changes = [method.finalise(task.net, datamodule) for method in late]
    if not any(changes):
        return False
    report = {name: value for method in late for name, value in method.report().items()}
    write_weights(best, task.net, {**state, "report": report})
    return True


def write_weights(path: Path, net: Any, state: dict[str, Any]) -> None:
    """Writes a checkpoint of `net` as it is: weights and structure, at the step of `state`, without what goes on
    training.
    """
    kept: dict[str, Any] = {name: state[name] for name in KEPT if name in state}
    weights = {name: value.detach().clone().contiguous() for name, value in net.state_dict().items()}
    AtomicCheckpointIO().save_checkpoint(
        {**kept, "state_dict": weights, "structure": structure_of(net), "finalised": True}, path
    )


def write_receipt(run: RunDir, cfg: dict[str, Any]) -> None:
    """Measures what compression has made, beside the run that this one started from. The run itself is complete: a
    receipt that fails is told, and can be asked for again."""
    try:
        receipt.write(run, cfg, None, cfg["compression"]["receipt"])
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        warnings.warn(
            f"The run is complete, but its receipt failed ({type(error).__name__}: {words}): "
            + run_command("scripts/receipt.py", "run", run.path, cfg),
            stacklevel=2,
        )


def complete(cfg: dict[str, Any]) -> None:
    """Measures what a complete run has no receipt of, since it was ended before."""
    quiet()
    write_receipt(RunDir(cfg["paths"]["run_dir"]), cfg)


def tell_what_is_not_measured(group: dict[str, Any]) -> None:
    """Warns, before a run, where its receipt will lack the ONNX files and their times, since their packages are not
    installed.
    """
    measured = methods(group) and group.get("receipt", "none") != "none"
    missing = export.get("onnx").available() if measured else None
    if missing:
        rank_zero_warn(f"compression.receipt={group['receipt']} will be without ONNX Runtime: {missing}")


def tell_what_goes(cfg: dict[str, Any], net: nn.Module, key: str) -> None:
    """Warns where training goes on from a net that was made small, named by `key`, without what keeps it so."""
    kinds = {node["kind"] for node in methods(cfg.get("compression") or {}).values()}
    zeros = math.ceil(zero_share(net) * 1e4) / 1e4  # not less: masks of that share then keep each of them
    if zeros > 0.05 and "masks" not in kinds:
        rank_zero_warn(
            f"{key}: {zeros} of the weights are pruned to zero, and this training fills them again; to keep them, add "
            "prune to compression, with compression.prune.schedule=one_shot compression.prune.start=0 "
            f"compression.prune.sparsity={zeros}."
        )
    if "quantization" in structure_of(net) and not kinds & {"quantization", "after"}:
        rank_zero_warn(
            f"{key} is a quantized net: it trains with rounding on and fixed ranges; add qat to compression, or start "
            "from the run that it was made from."
        )
