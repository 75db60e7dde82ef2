"""Builds the Trainer of a resolved configuration, and prepares the net for it."""

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

from lathe import strategies
from lathe.callbacks import AtomicCheckpointIO
from lathe.compression import Compression
from lathe.config.compression_plan import methods
from lathe.data.transfer import tell_no_effect
from lathe.errors import UserError, under
from lathe.runs.checkpoints import read_checkpoint
from lathe.runs.instantiate import instantiate, instantiate_as
from lathe.tasks import Task
from lathe.trainer import Trainer
from lathe.training.checkpoint_restore import CheckpointRestore

# keys of `trainer` that Lightning's Trainer does not take
LATHE_TRAINER_KEYS = (
    "sync_batchnorm",
    "activation_checkpointing",
    "steps_per_call",
    "num_workers",
    "prefetch_to_device",
    "channels_last",
    "fused_optimizer",
)
OWN_CHECKPOINTS = "checkpoints/own"  # of a user's ModelCheckpoint, whose last.ckpt must not replace the run's


class _Printer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), flush=True)


def configure_logging() -> None:
    """Silence Lightning's messages at every start, which repeat the configuration; keep its warnings."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    profiler = logging.getLogger("lightning.pytorch.profilers")
    if not profiler.handlers:  # the report of trainer.profiler
        profiler.addHandler(_Printer())
        profiler.setLevel(logging.INFO)
        profiler.propagate = False  # two loggers above would print it again
    for message in (
        ".*does not have many workers.*",  # images on the device need none
        f"Checkpoint directory .*{re.escape(OWN_CHECKPOINTS)} exists and is not",  # of a resumed run
        "The `srun` command is available on your system but is not used",  # the ranks are running already
        ".*treespec, LeafSpec.*",  # Lightning 2.6 calls torch's tree functions by older names
    ):
        warnings.filterwarnings("ignore", message=message)


def make_trainer(
    cfg: dict[str, Any], directory: Path, callbacks: list[Callback], loggers: list[Logger] | None = None
) -> Trainer:
    """Build the Trainer for the groups `trainer`, `strategy` and `precision`; it writes below `directory`."""
    options = instantiate(_without(cfg["trainer"], "_target_", *LATHE_TRAINER_KEYS), "trainer")
    device = device_type(options["accelerator"])
    if not options.get("gradient_clip_val") and options.get("gradient_clip_algorithm") == "norm":
        options["gradient_clip_algorithm"] = None  # Lightning refuses a module's own clipping with any other value
    kinds = {
        "enable_checkpointing": CheckpointBase,
        "enable_progress_bar": ProgressBar,
        "enable_model_summary": ModelSummary,
    }
    for key, kind in kinds.items():  # Lightning would add its own for a callback that was left out
        options[key] = any(isinstance(callback, kind) for callback in callbacks)
    if options.get("devices") == -1 and device == "cpu":
        options["devices"] = "auto"  # Lightning takes -1 for GPUs only
    if cfg["strategy"].get("processes") == "one":
        options["devices"] = 1
    several = world_size() > 1
    node = _without(cfg["strategy"], "processes", "precisions", "compressions")
    strategy = instantiate_as(node, "strategy", Strategy, or_none=True)
    with under("precision"):
        precision = strategies.precision_plugin(cfg["precision"]["name"], device, **_without(cfg["precision"], "name"))
    plugins = [AtomicCheckpointIO(read_checkpoint), *precision.pop("plugins", [])]
    if several and cfg["trainer"].get("sync_batchnorm", False):
        plugins.append(TorchSyncBatchNorm() if device == "cuda" else strategies.SyncBatchNorm())
    if not several and not TorchElasticEnvironment.detect() and getattr(strategy, "cluster_environment", None) is None:
        plugins.append(LightningEnvironment())  # Lightning would read ranks from the variables of a batch job
    if strategy is None:
        strategy = strategies.DDP() if several else "auto"
    steps_per_call = cfg["trainer"].get("steps_per_call", "auto")
    options |= precision | {
        "strategy": strategy,
        "plugins": plugins,
        "callbacks": callbacks,
        "logger": loggers or False,
        "default_root_dir": str(directory),
        "steps_per_call": None if steps_per_call == "auto" else steps_per_call,
        "prefetch_to_device": cfg["trainer"].get("prefetch_to_device", False),
    }
    try:
        with under("trainer"):
            trainer = Trainer(**options)
    except TypeError as error:
        raise UserError(f"trainer can't be built: {error}") from error
    trainer._checkpoint_connector = CheckpointRestore(trainer)
    tell_no_effect(trainer.prefetch_to_device, trainer.strategy.root_device)
    return trainer


def _without(node: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in keys}


def to_double(task: nn.Module, cfg: Mapping[str, Any]) -> None:
    """Convert the net to float64 under precision=64-true, before a checkpoint is loaded.

    Lightning does so afterwards, when the weights have been rounded to float32.
    """
    if cfg["precision"]["name"] == "64-true":
        task.double()


def prepare_model(cfg: dict[str, Any], task: Task, trainer: Trainer) -> None:
    """Apply activation checkpointing, the memory format and torch.compile to the net, in place."""
    uses_core = cfg["compile"].get("enabled") or methods(cfg.get("compression") or {})
    if uses_core or cfg["trainer"].get("activation_checkpointing", "none") != "none":
        task.print_core()
    check = getattr(trainer.strategy, "check", None)
    if check is not None:
        check(task.net)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # a connector sets it
        if isinstance(callback, Compression):
            callback.check(task.core)
    device = trainer.strategy.root_device.type
    with under("trainer"):
        how = cfg["trainer"].get("activation_checkpointing", "none")
        if how != "none":
            from lathe.nets import recompute  # for this key only

            recompute.check_device(how, device)
            recompute.apply(task.core, how)
        if cfg["trainer"].get("channels_last", False):
            strategies.channels_last(task.net, trainer.strategy, cfg["trainer"]["channels_last"])
    with under("compile"):
        cache = Path(cfg["paths"]["data_dir"]) / "compiled" if "data_dir" in cfg["paths"] else None
        if cfg["compile"].get("enabled"):
            strategies.compile_task(task, device, cfg["compile"], cache)


def world_size() -> int:
    """Return the number of ranks, as the launcher has set it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_WORLD_SIZE" in os.environ else 1


def device_type(accelerator: str) -> str:
    """Return cpu, cuda or mps: what Lightning chooses for `trainer.accelerator` on this machine."""
    if accelerator in ("auto", "gpu"):
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    return accelerator


def describe_device(trainer: lightning.pytorch.Trainer) -> str:
    """Return a message with the device of `trainer.accelerator=auto`, and the reason if it is a CPU."""
    device, several = trainer.strategy.root_device, trainer.world_size
    if device.type == "cpu":
        built = "sees no GPU" if torch.version.cuda or torch.version.hip else "is built without GPU support"
        return f"trainer.accelerator=auto took the CPU: torch {torch.__version__} {built}."
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Apple's GPU"
    return f"trainer.accelerator=auto took {f'{several} x' if several > 1 else f'{device},'} {name}."
