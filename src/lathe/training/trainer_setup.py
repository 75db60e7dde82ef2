"""Builds callbacks, compression methods, loggers and the Trainer of a configuration, and prepares the net for it."""

import inspect
import logging
import os
import re
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    LearningRateFinder,
    ModelPruning,
    ModelSummary,
    ProgressBar,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks import Checkpoint as CheckpointBase
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch import nn

import lathe.callbacks
from lathe import strategies
from lathe.callbacks import AtomicCheckpointIO, ExactResume, TrialReport
from lathe.compression import Compression
from lathe.config.compression_plan import methods, windows
from lathe.config.schema import canonical
from lathe.data.transfer import tell_no_effect
from lathe.errors import UserError, require, under
from lathe.runs.checkpoints import read_checkpoint
from lathe.runs.instantiate import instantiate, instantiate_as, locate
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


# Lightning's callbacks that don't work in a run, and what does
REFUSED: dict[type[Callback], str] = {
    LearningRateFinder: "it trains inside the run with settings of its own: use scripts/lr_find.py",
    BatchSizeFinder: "it trains inside the run with settings of its own: use scripts/batch_find.py",
    StochasticWeightAveraging: "it averages after the last checkpoint is written: use callbacks=[default,ema]",
}
# keys of `trainer` for callbacks, which Lightning would add itself where one was left out
TRAINER_SWITCHES: dict[str, tuple[str, type]] = {
    "checkpoint": ("enable_checkpointing", CheckpointBase),
    "progress_bar": ("enable_progress_bar", ProgressBar),
    "model_summary": ("enable_model_summary", ModelSummary),
}


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


def make_callbacks(cfg: dict[str, Any], task: Task) -> list[Callback]:
    """Build the callbacks that every run needs, the compression methods, and those of `callbacks`."""
    trainer = cfg["trainer"]
    skipped = {name for name, (switch, _) in TRAINER_SWITCHES.items() if not trainer[switch]}
    if trainer["fast_dev_run"]:
        skipped.add("checkpoint")
    nodes = {name: node for name, node in cfg["callbacks"].items() if node is not None and name not in skipped}
    built: dict[str, Callback] = {}
    names_by_role: dict[str, str] = {}  # by place in a checkpoint
    for name, node in nodes.items():
        node = _with_metric(name, node, nodes.get("checkpoint"), task)
        built[name] = instantiate_as(node, f"callbacks.{name}", Callback)
        for kind, reason in REFUSED.items():
            require(not isinstance(built[name], kind), f"callbacks.{name}: {kind.__name__}: {reason}.")
        if isinstance(built[name], ModelPruning):
            rank_zero_warn(f"callbacks.{name}: ModelPruning saves no masks. Use compression=prune.")
        role = "a progress bar" if isinstance(built[name], ProgressBar) else built[name].state_key
        other = names_by_role.setdefault(role, name)
        require(other == name, f"callbacks.{other} and callbacks.{name} are both {role}: leave one of them out.")
    frozen = [lathe.callbacks.FrozenStatistics()] if cfg.get("freeze") else []
    return [ExactResume(cfg["seed"]), *task.own_callbacks(), *frozen, *make_methods(cfg), *built.values()]


def _with_metric(name: str, node: Any, checkpoint: Any, task: Task) -> Any:
    """Return a callback's node with a metric for `monitor: auto`, and its direction for `mode: auto`.

    The metric is that of the checkpoint callback, if it names one, else the task's.
    """
    if not isinstance(node, dict):
        return node
    monitor, mode = node.get("monitor"), node.get("mode")
    if monitor == "auto":
        is_named = isinstance(checkpoint, dict) and checkpoint.get("monitor") not in ("auto", None)
        monitor = checkpoint["monitor"] if is_named else task.monitor or None
        if monitor is None:  # for the checkpoint callback of a task that declares no metrics
            start = f"callbacks.{name}.monitor=auto: {type(task.driven).__name__} declares no metrics"
            is_checkpoint = canonical(str(node.get("_target_"))) == "lathe.callbacks.Checkpoint"
            require(is_checkpoint, f"{start}. Name one: callbacks.{name}.monitor=val_loss callbacks.{name}.mode=min.")
            rank_zero_only(print)(f"{start}, so best.ckpt is the last epoch.")
        mode = checkpoint.get("mode", "auto") if is_named and mode == "auto" else mode
        node = {**node, "monitor": monitor}
    if mode == "auto":
        metric = str(monitor).rpartition("/")[2]
        is_known = monitor is None or monitor in task.metric_names or not task.logs_more
        require(
            is_known and metric not in task.undirected,
            f"callbacks.{name}.mode=auto: nothing says whether a higher {monitor} is better: set callbacks.{name}.mode "
            "to max or min.",
        )
        mode = "min" if metric in task.minimised else "max"
    return node if mode is None else {**node, "mode": mode}


def make_methods(cfg: dict[str, Any]) -> list[Compression]:
    """Build the compression methods in their order, each with its window of the run."""
    group = cfg.get("compression") or {}
    shares = windows(group)
    built: list[Compression] = []
    for name, node in methods(group).items():
        node = {key: value for key, value in node.items() if key != "kind"}
        method: Compression = instantiate_as(node, f"compression.{name}", Compression)
        method.window = shares[name]
        if hasattr(method, "open_run"):
            from lathe.runs.inference import open_core  # for teachers only

            method.open_run = partial(open_core, key=f"compression.{name}.teacher")
        built.append(method)
    return built


def make_loggers(cfg: dict[str, Any], run_dir: Path, start_step: int) -> list[Logger]:
    """Build the loggers of `logger`, and last that of metrics.csv, which every run has.

    `start_step` is the optimizer step at which this process begins. A task's `self.logger` is the first.
    """
    nodes = {name: node for name, node in cfg["logger"].items() if node is not None}
    csv = nodes.pop("csv", {"_target_": "lathe.loggers.csv"})
    loggers: list[Logger] = []
    for name, node in [*nodes.items(), ("csv", csv)]:
        kind = locate(node)
        if not inspect.isclass(kind):
            loggers.append(instantiate_as(node, f"logger.{name}", Logger, run_dir, start_step))
            continue
        takes_folder = "save_dir" in inspect.signature(kind).parameters
        node = {"save_dir": str(run_dir), **node} if takes_folder else node
        loggers.append(instantiate_as(node, f"logger.{name}", Logger))
    return loggers


def trial_report(cfg: dict[str, Any], task: Task, sweep: dict[str, Any] | None) -> list[TrialReport]:
    """Build the callback that reports validations to a search; none for a run that is not part of one.

    `sweep` has the sweep's folder and the job's number.
    """
    if sweep is None or sweep.get("job") is None:
        return []
    from lathe.runs.optuna_study import trial_of

    trial, _, options = trial_of(Path(sweep["folder"]), sweep["job"])
    monitor = cfg["objective"] or cfg["callbacks"].get("checkpoint", {}).get("monitor")
    monitor = task.monitor if monitor in (None, "auto") else monitor
    compares_runs = options.get("pruner", "none") != "none" and options.get("repeats") is None
    if not compares_runs or monitor is None:
        return []
    return [TrialReport(trial if getattr(rank_zero_only, "rank", 0) == 0 else None, monitor)]


def make_trainer(
    cfg: dict[str, Any], directory: Path, callbacks: list[Callback], loggers: list[Logger] | None = None
) -> Trainer:
    """Build the Trainer for the groups `trainer`, `strategy` and `precision`; it writes below `directory`."""
    options = instantiate(_without(cfg["trainer"], "_target_", *LATHE_TRAINER_KEYS), "trainer")
    device = device_type(options["accelerator"])
    if not options.get("gradient_clip_val") and options.get("gradient_clip_algorithm") == "norm":
        options["gradient_clip_algorithm"] = None  # Lightning refuses a module's own clipping with any other value
    for key, kind in TRAINER_SWITCHES.values():
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
