"""The Trainer of a resolved configuration."""

import logging
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.callbacks import Callback, ModelSummary, ProgressBar
from lightning.pytorch.callbacks import Checkpoint as CheckpointBase
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.strategies import Strategy
from torch import nn

from lathe.callbacks import AtomicCheckpointIO, Compression
from lathe.data.prefetch import tell_no_effect
from lathe.errors import under
from lathe.nets import recompute
from lathe.runs.build import call_factory
from lathe.runs.checkpoints import read_checkpoint
from lathe.runs.nodes import make, make_part
from lathe.runs.restoring import Restoring
from lathe.strategies import DDP, SyncBatchNorm, channels_last, compile_task, precision_plugin
from lathe.tasks import Task
from lathe.trainer import Trainer

# keys of `trainer` that Lightning's does not have
OURS = (
    "sync_batchnorm",
    "activation_checkpointing",
    "steps_per_call",
    "num_workers",
    "prefetch_to_device",
    "channels_last",
    "fused_optimizer",
)

OWN_CHECKPOINTS = "checkpoints/own"  # in the run directory; beside it, a last.ckpt would be in the way of the run's own
REPORTS = "lightning.pytorch.profilers"  # the logger of what trainer.profiler has measured


class _Printed(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), flush=True)


def quiet() -> None:
    """Leaves Lightning its warnings and takes its chatter, which says at every start what the configuration says
    already.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    reports = logging.getLogger(REPORTS)
    if not reports.handlers:  # a profiler's report is what was asked for
        reports.addHandler(_Printed())
        reports.setLevel(logging.INFO)
        reports.propagate = False  # two loggers above it would print it, each in its form
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # images on the device need none
    # of a run that goes on, in which a ModelCheckpoint of the user's own has written before
    warnings.filterwarnings("ignore", message=f"Checkpoint directory .*{re.escape(OWN_CHECKPOINTS)} exists and is not")
    # a run that is to have several ranks has started them
    warnings.filterwarnings("ignore", message="The `srun` command is available on your system but is not used")
    warnings.filterwarnings(
        "ignore", message=".*treespec, LeafSpec.*"
    )  # Lightning 2.6 calls torch's tree functions by their older names


def _without(node: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in keys}


def make_trainer(
    cfg: dict[str, Any], directory: Path, callbacks: list[Callback], loggers: list[Logger] | None = None
) -> Trainer:
    """Make the Trainer for the configuration's `trainer`, `strategy` and `precision` groups, writing below
    `directory`.

    Raises:
        UserError: an argument that the Trainer does not take, or a combination that it refuses.
    """
    options = _without(cfg["trainer"], *OURS) | {"_target_": "lathe.trainer.Trainer"}  # in place of Lightning's
    if not options.get("gradient_clip_val") and options.get("gradient_clip_algorithm") == "norm":
        options["gradient_clip_algorithm"] = None  # with any, a module could not clip by another itself
    kinds = {
        "enable_checkpointing": CheckpointBase,
        "enable_progress_bar": ProgressBar,
        "enable_model_summary": ModelSummary,
    }
    for key, kind in kinds.items():  # Lightning would put one of its own in the place of a callback that was left out
        options[key] = any(isinstance(callback, kind) for callback in callbacks)
    if options.get("devices") == -1 and device_type(options["accelerator"]) == "cpu":
        options["devices"] = "auto"  # all that there are, which Lightning counts on GPUs alone
    one_process = cfg["strategy"].get("processes") == "one"
    if one_process:
        options["devices"] = 1
    spread = _without(cfg["strategy"], "processes", "precisions", "compressions")
    strategy = make_part(spread, "strategy", Strategy, or_none=True)
    several = world_size() > 1
    number_format = cfg["precision"]
    with under("precision"):
        precision = precision_plugin(
            number_format["name"], device_type(options["accelerator"]), **_without(number_format, "name")
        )
    plugins = [AtomicCheckpointIO(read_checkpoint), *precision.pop("plugins", [])]
    if several and cfg["trainer"].get("sync_batchnorm", False):
        plugins.append(TorchSyncBatchNorm() if device_type(options["accelerator"]) == "cuda" else SyncBatchNorm())
    if not several and not TorchElasticEnvironment.detect() and getattr(strategy, "cluster_environment", None) is None:
        plugins.append(LightningEnvironment())  # it would take what a batch script left in the environment for ranks
    per_call = cfg["trainer"].get("steps_per_call", "auto")
    trainer: Trainer = call_factory(
        make({**options, **precision, "_partial_": True}, "trainer"),
        "trainer",
        strategy=strategy if strategy is not None else DDP() if several else "auto",
        plugins=plugins,
        callbacks=callbacks,
        logger=loggers or False,
        default_root_dir=str(directory),
        steps_per_call=None if per_call == "auto" else per_call,
        prefetch_to_device=cfg["trainer"].get("prefetch_to_device", False),
    )
    trainer._checkpoint_connector = Restoring(trainer)
    tell_no_effect(trainer.prefetch_to_device, trainer.strategy.root_device)
    return trainer


def widen(task: nn.Module, cfg: Mapping[str, Any]) -> None:
    """Makes the net's numbers double under precision=64-true, before a checkpoint is read: Lightning does so after it
    has restored one, whose weights would have been rounded to float32.
    """
    if cfg["precision"]["name"] == "64-true":
        task.double()


def world_size() -> int:
    """How many ranks take part, as the launcher has said."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_WORLD_SIZE" in os.environ else 1


def found_device(trainer: lightning.pytorch.Trainer) -> str:
    """What `trainer.accelerator=auto` took, in a sentence; where that is a CPU, why."""
    device, several = trainer.strategy.root_device, trainer.world_size
    if device.type == "cpu":
        built = "sees no GPU" if torch.version.cuda or torch.version.hip else "is built without GPU support"
        return f"trainer.accelerator=auto took the CPU: torch {torch.__version__} {built}."
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Apple's GPU"
    return (
        f"trainer.accelerator=auto took {several} x {name}."
        if several > 1
        else f"trainer.accelerator=auto took {device}, {name}."
    )


def device_type(accelerator: str) -> str:
    """cpu, cuda or mps: what Lightning makes of `trainer.accelerator` on this machine."""
    if accelerator in ("auto", "gpu"):
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    return {"gpu": "cuda"}.get(accelerator, accelerator)


def prepare(cfg: dict[str, Any], task: Task, trainer: Trainer) -> None:
    """Makes the net recompute and compile what the configuration asks for, in place.

    Raises:
        UserError: the net can't.
    """
    check = getattr(trainer.strategy, "check", None)
    if check is not None:
        check(task.net)  # a net that can't be spread so is told before any data is touched
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # a connector sets it
        if isinstance(callback, Compression):
            callback.check(task.net)
    with under("trainer"):
        how = cfg["trainer"].get("activation_checkpointing", "none")
        recompute.check_device(how, trainer.strategy.root_device.type)
        recompute.apply(task.net, how)
        channels_last(task.net, trainer.strategy, cfg["trainer"].get("channels_last", False))
    with under("compile"):
        kept = Path(cfg["paths"]["data_dir"]) / "compiled" if "data_dir" in cfg["paths"] else None
        compile_task(task, trainer.strategy.root_device.type, cfg["compile"], kept)
