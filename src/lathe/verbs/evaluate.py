"""Evaluate a trained run on any split, from its directory."""

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console
from rich.table import Table

from lathe.callbacks import Progress
from lathe.data.base import ExactDataModule
from lathe.errors import require
from lathe.files import followed, require_file, write_atomically
from lathe.images import SUFFIXES
from lathe.loggers import Discard
from lathe.runs.build import make_data, make_task
from lathe.runs.checkpoints import read_checkpoint, restore
from lathe.runs.rundir import OWN_FILES, RunDir
from lathe.tasks import LightningTask, Task
from lathe.training.checkpoint_restore import RestoreOwnState
from lathe.training.trainer_setup import configure_logging, make_trainer, to_double
from lathe.verbs.runs.reader import check_output

IMAGES = (*SUFFIXES, ".npy")


# of a run, for one process that predicts or evaluates
HERE = {"accelerator": "auto", "devices": 1, "num_nodes": 1, "enable_progress_bar": False}
AUTO = {"_target_": "lathe.strategies.auto", "processes": "per_device"}


def rebuild(cfg: dict[str, Any]) -> tuple[Task, Trainer]:
    """Build the task with the requested checkpoint, and a Trainer, without the data, which may have moved."""
    configure_logging()
    request, run = cfg["request"], RunDir(cfg["paths"]["run_dir"])
    path = run.checkpoint(request["checkpoint"], "checkpoint")
    task: Task = make_task(cfg, train=False)
    if isinstance(task, LightningTask) and request.get("trainer", {}).get("inference_mode") is None:
        # its validation step may need gradients, which it has in a fit
        cfg = {**cfg, "trainer": {**cfg["trainer"], "inference_mode": False}}
    to_double(task, cfg)
    state = read_checkpoint(path)
    restore(task.net, state, str(path))
    callbacks: list[Callback] = task.own_callbacks()
    if cfg["trainer"]["enable_progress_bar"]:
        callbacks.append(Progress())
    callbacks.append(RestoreOwnState(state))
    # other tasks log only numbers, which are read from the Trainer
    loggers: list[Logger] | None = [Discard()] if isinstance(task, LightningTask) else None
    return task, make_trainer(cfg, run.path, callbacks, loggers)


def check_request(request: dict[str, Any], suffixes: tuple[str, ...] = ()) -> None:
    """Raise UserError if `output` can't be written, has none of `suffixes`, or is an input or a file of the run."""
    output, source = request["output"], request.get("input")
    check_output(output, suffixes)
    if output is None:
        return
    require_file(Path(output))
    target, home, read = Path(output).resolve(), Path(request["run"]).resolve(), source and Path(source).resolve()
    image = target.parent == read and target.suffix.lower() in IMAGES
    require(target != read and not image, f"output={output} would take the place of input={source}: name another file.")
    inside = target.relative_to(home).parts if target.is_relative_to(home) else ()
    require(
        not inside or inside[0] not in OWN_FILES,
        f"output={output} would take the place of the run's own {'/'.join(inside)}: name another file.",
    )


class OpenedToFit(Callback):
    """Also call `setup("fit")`: a user's data module may open its training and validation data only there."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.datamodule.setup("fit")  # type: ignore[attr-defined]  # a connector sets it


def evaluate(cfg: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a split, keyed by `split/metric`; rank 0 prints and writes them."""
    request = cfg["request"]
    split = request["split"]
    check_request(request)
    task, trainer = rebuild(cfg)
    datamodule = make_data(cfg)
    has = is_overridden(f"{split}_dataloader", datamodule, LightningDataModule)
    require(has, f"split={split}: {type(datamodule).__name__} has no {split}_dataloader.")
    step = "validation_step" if split == "val" else "test_step"
    own = is_overridden(step, task.driven)
    require(own, f"split={split}: {type(task.driven).__name__} has no {step}.")
    if split != "test" and not isinstance(datamodule, ExactDataModule):
        trainer.callbacks.append(OpenedToFit())  # type: ignore[attr-defined]  # a connector sets it
    if split == "val":  # as in training, with the task's own metrics, and the same limit as other splits
        trainer.limit_val_batches = trainer.limit_test_batches
        trainer.validate(task.driven, datamodule=datamodule, verbose=False)
    else:
        datamodule.test_split = split
        # for a training loader: the order has no effect here
        warnings.filterwarnings("ignore", message="Your `test_dataloader`'s sampler has shuffling enabled")
        trainer.test(task.driven, datamodule=datamodule, verbose=False)
    metrics = {re.sub(r"^test(?=[/_])", split, name): float(value) for name, value in trainer.callback_metrics.items()}
    if not trainer.is_global_zero:
        return metrics
    table = Table(show_header=False)
    for name, value in sorted(metrics.items()):
        table.add_row(name, f"{value:.6f}")
    print(f"{request['run']}, {request['checkpoint']}.ckpt")
    Console().print(table)
    if request["output"] is not None:  # a perplexity may be infinite
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        text = json.dumps(finite, indent=2, sort_keys=True) + "\n"
        write_atomically(followed(Path(request["output"])), text)
    return metrics
