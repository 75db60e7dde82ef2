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
from lathe.files import followed, require_file, require_writable, write_atomically
from lathe.images.files import SUFFIXES
from lathe.loggers.discard import Discard
from lathe.runs.build import make_data, make_task
from lathe.runs.checkpoints import read_checkpoint, restore
from lathe.runs.rundir import OWN_FILES, RunDir
from lathe.tasks import LightningTask, Task
from lathe.training.checkpoint_restore import RestoreOwnState
from lathe.training.trainer_setup import configure_logging, make_trainer, to_double

IMAGES = (*SUFFIXES, ".npy")
# suffixes that name a file format
FORMATS = (
    *(".csv", ".tsv", ".json", ".jsonl", ".yaml", ".xml", ".html", ".xls", ".xlsx", ".ods", ".db", ".sqlite"),
    *(".parquet", ".feather", ".arrow", ".h5", ".hdf5", ".npy", ".npz", ".pkl", ".pickle", ".pt", ".pth", ".gz"),
)


# of a run, for one process that predicts or evaluates
HERE = {"accelerator": "auto", "devices": 1, "num_nodes": 1, "enable_progress_bar": False}
AUTO = {"_target_": "lathe.strategies.auto", "processes": "per_device"}


def rebuild(cfg: dict[str, Any]) -> tuple[Task, Trainer]:
    """Build the task with the requested checkpoint, and a Trainer, without the data, which may have moved."""
    configure_logging()
    request, run = cfg["request"], RunDir(cfg["paths"]["run_dir"])
    path = run.checkpoint(request["checkpoint"], "checkpoint")
    task: Task = make_task(cfg, train=False)
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


def check_request(request: dict[str, Any], written: tuple[str, ...] = (".json",)) -> None:
    """Raise UserError if `output` of evaluate.py or predict.py, a file of these suffixes, can't be written."""
    output = request["output"]
    if output is not None:
        require(Path(output).resolve().parent.is_dir(), f"output={output}: its folder does not exist.")
        require(not Path(output).is_dir(), f"output={output} is a folder: name a file.")
        require_writable(Path(output).resolve().parent)
        check_output(Path(output), Path(request["run"]), request.get("input"), written)


def check_output(output: Path, run: Path, source: str | None, written: tuple[str, ...]) -> None:
    """Raise UserError if `output` would replace an input or a file of the run, or has a wrong suffix."""
    place = output.resolve()
    require_file(output)
    if source is not None:
        read = Path(source).resolve()
        image = place.parent == read and place.suffix.lower() in IMAGES
        require(
            place != read and not image, f"output={output} would take the place of input={source}: name another file."
        )
    home = run.resolve()
    inside = place.relative_to(home).parts if place.is_relative_to(home) else ()
    require(
        not inside or inside[0] not in OWN_FILES,
        f"output={output} would take the place of the run's own {'/'.join(inside)}: name another file.",
    )
    require(
        output.suffix.lower() in written or (len(written) == 1 and output.suffix.lower() not in FORMATS),
        f"output={output}: what is written is {' or '.join(suffix[1:].upper() for suffix in written)}: call it "
        f"{output.with_suffix(written[0]).name}.",
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
    if trainer.is_global_zero:
        table, console = Table(show_header=False), Console()
        for name, value in sorted(metrics.items()):
            table.add_row(name, f"{value:.6f}")
        title = f"{request['run']}, {request['checkpoint']}.ckpt"
        console.print(title, soft_wrap=True, markup=False, highlight=False)  # not wrapped, so that it can be copied
        console.print(table)
    # a user's own metric may be NaN if there was nothing to count
    lost = sorted(
        name
        for name in metrics
        if math.isnan(metrics[name]) and name.partition("/")[2] in (*task.metrics, *task.computed)
    )
    require(
        not lost,
        f"{request['run']}, {request['checkpoint']}.ckpt: {' and '.join(lost)} is no number, though its weights are: "
        "the net overflows on this split; try precision=32-true, or another checkpoint.",
    )
    if trainer.is_global_zero and request["output"] is not None:
        words = {
            name: value if math.isfinite(value) else None for name, value in metrics.items()
        }  # a perplexity may be infinite
        text = json.dumps(words, indent=2, sort_keys=True, allow_nan=False) + "\n"
        write_atomically(followed(Path(request["output"])), text)
    return metrics
