"""Builds the parts from a resolved configuration and drives the Trainer. The only file that knows all the parts.

Every function takes the resolved configuration as plain data and runs in each rank.
"""

import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lathe import rundir, stacking, summary
from lathe.build import call_factory, make, make_task
from lathe.callbacks import (
    AtomicCheckpointIO,
    Checkpoint,
    Compression,
    ExactResume,
    Preemption,
    Progress,
    Throughput,
    skip_empty_hooks,
)
from lathe.checkpoints import read_checkpoint, restore
from lathe.compression.structure import apply_structure
from lathe.config import did_you_mean, require
from lathe.errors import Stopped
from lathe.loggers import CSVLogger
from lathe.nets import recompute
from lathe.stages import methods
from lathe.strategies import DDP, SyncBatchNorm, compile_net, precision_plugin
from lathe.tasks import Task


def train(cfg: dict[str, Any]) -> dict[str, Any]:
    """Trains, or continues, the run in `paths.run_dir`, tests its best checkpoint once, and returns what result.json holds.

    Raises:
        UserError: a part can't be built, or the data or the disk is not fit.
        Stopped: a signal ended the run, which can be resumed.
    """
    quiet()
    run = rundir.RunDir(cfg["paths"]["run_dir"])
    began = time.monotonic()
    seed_everything(cfg["seed"], workers=True, verbose=False)
    datamodule = make(cfg["data"], "data")
    task = make_task(cfg)
    resume = run.last if run.last.exists() else None
    state = read_checkpoint(resume) if resume else None
    if state is not None:
        apply_structure(task.net, state.get("structure", {}))
    loggers = make_loggers(cfg, run.path, state["global_step"] if state else 0)
    callbacks = [LambdaCallback(on_fit_start=lambda trainer, task: begin(run, trainer)), *make_callbacks(cfg, task)]
    skip_empty_hooks(callbacks)
    trainer = make_trainer(cfg, run.path, callbacks, loggers)
    parameters = sum(p.numel() for p in task.net.parameters())  # before a strategy spreads them
    if state is None and cfg["ckpt_path"] is not None:
        resume = start_from(cfg, task)
    prepare(cfg, task, trainer)
    try:
        trainer.fit(task, datamodule=datamodule, ckpt_path=resume, weights_only=True)
    except SIGTERMException as error:
        received = next((c.received for c in callbacks if isinstance(c, Preemption)), None)
        raise Stopped(received or "SIGTERM", str(run.path)) from error
    result = finish(cfg, run, trainer, task, datamodule, callbacks)
    result = {"parameters": parameters, **result}
    result["seconds"] = time.monotonic() - began
    if trainer.is_global_zero:
        run.finish(result)
        summary.show(result, run.path)
        if any(isinstance(callback, Compression) for callback in callbacks) and cfg["compression"]["receipt"] != "none":
            stacking.write_receipt(run, cfg)
    return result


def quiet() -> None:
    """Leaves Lightning its warnings and takes its chatter, which says at every start what the configuration says already."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # images on the device need none
    warnings.filterwarnings(
        "ignore", message=".*recommended to use `self.log.*sync_dist=True.*"
    )  # tasks add up the ranks' sums themselves
    warnings.filterwarnings(
        "ignore", message=".*treespec, LeafSpec.*"
    )  # Lightning 2.6 calls torch's tree functions by their older names


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
    recompute.apply(task.net, cfg["trainer"].get("activation_checkpointing", "none"))
    compile_net(task.net, trainer.strategy.root_device.type, **cfg["compile"])


def _without(node: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in keys}


def make_trainer(cfg: dict[str, Any], directory: Path, callbacks: list[Callback], loggers: list[Logger] | None = None) -> Trainer:
    """Lightning's Trainer for the configuration's `trainer`, `strategy` and `precision` groups, writing below `directory`.

    Raises:
        UserError: an argument that the Trainer does not take, or a combination that it refuses.
    """
    options = _without(cfg["trainer"], "sync_batchnorm", "activation_checkpointing")
    one_process = cfg["strategy"].get("processes") == "one"
    if one_process:
        options["devices"] = 1
    strategy = make(_without(cfg["strategy"], "processes", "precisions", "compressions"), "strategy")
    several = world_size() > 1
    number_format = cfg["precision"]
    precision = precision_plugin(number_format["name"], device_type(options["accelerator"]), **_without(number_format, "name"))
    plugins = [AtomicCheckpointIO(read_checkpoint), *precision.pop("plugins", [])]
    if several and cfg["trainer"].get("sync_batchnorm", False):
        plugins.append(TorchSyncBatchNorm() if device_type(options["accelerator"]) == "cuda" else SyncBatchNorm())
    return call_factory(
        make({**options, **precision, "_partial_": True}, "trainer"),
        "trainer",
        strategy=strategy if strategy is not None else DDP() if several else "auto",
        plugins=plugins,
        callbacks=callbacks,
        logger=loggers or False,
        default_root_dir=str(directory),
    )


def world_size() -> int:
    """How many ranks take part, as the launcher has said."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_WORLD_SIZE" in os.environ else 1


def device_type(accelerator: str) -> str:
    """cpu, cuda or mps: what Lightning makes of `trainer.accelerator` on this machine."""
    if accelerator in ("auto", "gpu"):
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    return {"gpu": "cuda"}.get(accelerator, accelerator)


def make_callbacks(cfg: dict[str, Any], task: Task) -> list[Callback]:
    """The callbacks that the configuration lists, and the one that every run needs.

    Raises:
        UserError: a callback monitors a figure that the task does not report.
    """
    trainer = cfg["trainer"]
    skip = set()
    if trainer["fast_dev_run"] or not trainer["enable_checkpointing"]:
        skip.add("checkpoint")
    if not trainer["enable_progress_bar"]:
        skip.add("progress_bar")
    if not trainer["enable_model_summary"]:
        skip.add("model_summary")
    nodes = {name: node for name, node in cfg["callbacks"].items() if node is not None and name not in skip}
    callbacks: list[Callback] = [ExactResume(cfg["seed"]), *stacking.make_methods(cfg)]
    for name, node in nodes.items():
        node = _monitoring(node, task)
        callbacks.append(make(node, f"callbacks.{name}"))
        monitor = node.get("monitor")
        hint = did_you_mean(str(monitor), task.metric_names)
        known = monitor is None or monitor in task.metric_names
        require(known, f"callbacks.{name}.monitor={monitor}: the task reports no such figure; {hint}")
    return callbacks


def _monitoring(node: dict[str, Any], task: Task) -> dict[str, Any]:
    """A callback's node with the task's own figure for `monitor: auto`, and for `mode: auto` that figure's direction."""
    if node.get("monitor") == "auto":
        node = {**node, "monitor": task.monitor}
    if node.get("mode") == "auto":
        node = {**node, "mode": "min" if str(node["monitor"]).rpartition("/")[2] in task.minimised else "max"}
    return node


def make_loggers(cfg: dict[str, Any], run_dir: Path, start_step: int) -> list[Logger]:
    """metrics.csv, which every run has, and the loggers that the configuration lists."""
    nodes = {"csv": {"_target_": "lathe.loggers.csv"}, **{name: node for name, node in cfg["logger"].items() if node is not None}}
    return [make(node, f"logger.{name}", run_dir, start_step) for name, node in nodes.items()]


def begin(run: rundir.RunDir, trainer: Trainer) -> None:
    """Marks on disk that data and devices are ready and training begins: from here on, what the run leaves is kept."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            logger.begin()
    if trainer.is_global_zero:
        rundir.point_latest(run.path.parent.parent, run.path)


def start_from(cfg: dict[str, Any], task: Task) -> Path | None:
    """Takes what `ckpt_mode` says from `ckpt_path`: the net's weights at once, or the path for the Trainer to restore everything from."""
    path = Path(cfg["ckpt_path"])
    if path.is_dir() and not (path / "meta.pt").is_file():
        path = rundir.open_run(path, "ckpt_path").checkpoint("best" if cfg["ckpt_mode"] == "weights" else "last")
    state = read_checkpoint(path, "ckpt_path")
    if cfg["ckpt_mode"] == "trainer":
        require("optimizer_states" in state, f"ckpt_path={path} holds weights alone: use ckpt_mode=weights.")
        averaged = "ema" in state and "ema" not in cfg["callbacks"]
        require(
            not averaged,
            f"ckpt_path={path} holds averaged weights, ckpt_mode=trainer goes on from raw ones: add callbacks=[default,ema].",
        )
        nodes = methods(cfg.get("compression") or {})
        early = [name for name, node in nodes.items() if node["kind"] == "quantization" or node.get("mode") == "one_shot"]
        require(not early or "structure" in state, f"ckpt_mode=trainer takes over the optimizer of another net than the one that "
                                                   f"compression={','.join(early)} makes: use ckpt_mode=weights.")  # fmt: skip
        apply_structure(task.net, state.get("structure", {}))
        return path
    restore(task.net, state, f"ckpt_path={path}")
    stacking.tell_what_goes(cfg, task.net, f"ckpt_path={path}")
    return None


def finish(
    cfg: dict[str, Any], run: rundir.RunDir, trainer: Trainer, task: Task, datamodule: Any, callbacks: list[Callback]
) -> dict[str, Any]:
    """Tests the best checkpoint and gathers the final figures, keyed by `split/metric` or by their own names.

    A strategy that `reshapes` the net leaves nothing that takes plain weights, and compression may have changed the best ones after
    training: a new net is built then.
    """
    result: dict[str, Any] = {}
    made = [callback for callback in callbacks if isinstance(callback, Compression)]
    checkpoint = next((c for c in callbacks if isinstance(c, Checkpoint)), None)
    epochs, steps = trainer.current_epoch, trainer.global_step
    validation = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    if checkpoint is not None and run.best.exists():
        validation |= checkpoint.best_metrics
        changed = False
        if made:
            if trainer.is_global_zero:
                stacking.finalise(cfg, run.best, made)
            trainer.strategy.barrier()
            changed = bool(read_checkpoint(run.best).get("finalised", False))
        if cfg["test"] or changed:
            if made or getattr(trainer.strategy, "reshapes", False):
                task = make_task(cfg, train=False)
                trainer = make_trainer(cfg, run.path, [c for c in callbacks if isinstance(c, Progress)])
            restore(task.net, read_checkpoint(run.best), str(run.best))
        if changed:
            trainer.validate(task, datamodule=datamodule, verbose=False)
            validation |= {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        if made:
            result["parameters"] = sum(p.numel() for p in task.net.parameters())
        result |= {"best_step": checkpoint.best_step, "monitor": checkpoint.monitor}
    result |= validation
    if cfg["test"]:
        trainer.test(task, datamodule=datamodule, verbose=False)
        result |= {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("test/")}
    for callback in callbacks:
        if isinstance(callback, Throughput):
            result |= callback.summary()
    for method in made:
        result |= method.report()
    objective = cfg["objective"] or (checkpoint.monitor if checkpoint else None)
    require(objective is None or objective in result,
            f"objective={objective}: the run has no such figure; {did_you_mean(str(objective), result)}")  # fmt: skip
    return {
        **result,
        "objective": result.get(objective) if objective else None,
        "epochs": epochs,
        "steps": steps,
        "seed": cfg["seed"],
        "devices": trainer.world_size,
        "name": cfg["name"],
    }
