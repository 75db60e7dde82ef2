"""A finished run in a script or a notebook: its net, data, metrics and predictions."""

import copy
import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from omegaconf import DictConfig, OmegaConf
from torch import nn

from lathe import export
from lathe.compression.structure import apply_structure
from lathe.config.metric_names import split_of
from lathe.config.resolve import set_data_folder
from lathe.data import Normalizer
from lathe.data.checks import squashed
from lathe.errors import UserError, require
from lathe.images import ImageFile, find_images, open_array, open_image
from lathe.loggers.csv_logger import numbers, read_lines
from lathe.runs.checkpoints import read_checkpoint
from lathe.runs.checkpoints import restore as fill
from lathe.runs.export_model import class_names, is_image
from lathe.runs.inference import check_input_spec, is_lightning, open_data, open_run_net
from lathe.runs.rundir import RunDir, open_run
from lathe.serving.decode import probabilities
from lathe.tasks import Task
from lathe.tasks.core import core_of
from lathe.training.trainer_setup import configure_logging
from lathe.training.weight_loading import load_matching
from lathe.verbs.evaluate import AUTO, HERE, rebuild
from lathe.verbs.inside import same_numbers
from lathe.verbs.predict import Images, PlainLoader, arrays_of, check_tokens, gather, module_outputs, split_rows
from lathe.verbs.predict import batch_size as rows_of

Array = np.ndarray[Any, Any]


def load(
    path: str | Path = "logs/latest",
    checkpoint: str = "best",
    trusted: Sequence[str] = (),
    folder: str | Path | None = None,
    key: str = "run",
) -> "Run":
    """Open the run in the directory `path` with the weights of `checkpoint`; build objects on access.

    Args:
        path: a run directory
        checkpoint: `best` or `last`
        trusted: packages whose objects the run may build, as `trusted=[...]` of the commands
        folder: the new folder of its data if they have moved, as `data.folder=...`
        key: the name of `path` in messages

    Raises:
        UserError: it is not a run directory, or its configuration names a class that is not trusted.
    """
    run = Run(open_run(path, key, trusted), checkpoint)
    set_data_folder(run._config, None if folder is None else str(folder))
    return run


def restore(net: nn.Module, checkpoint: str | Path, strict: bool = True, key: str = "checkpoint") -> nn.Module:
    """Load a checkpoint into `net`, in place: structure (pruned channels, masks, quantizers) and weights.

    Args:
        net: as its class builds it
        checkpoint: a file of any run, a sharded folder, or a .safetensors of `lathe.export_module`
        strict: False loads the weights that fit, and prints those that don't
        key: the name of the file in messages

    Raises:
        UserError: the file is missing or damaged, or doesn't fit (with `strict` False: no weight fits).
    """
    path = Path(checkpoint)
    if path.suffix == ".safetensors":
        return export.get("safetensors").restore(net, path)
    state = read_checkpoint(path, key)
    if strict:
        fill(net, state, f"{key}={path}")
    else:
        apply_structure(core_of(net), state.get("structure", {}))
        lines = load_matching(net, state["state_dict"], f"{key}={path}")
        if len(lines) > 1:  # not all of them
            print(*lines, sep="\n")
    return net


@dataclass(frozen=True, repr=False)
class Predictions:
    """The predictions of a net for `n` samples.

    Float32 `logits` `[n, classes]` (of the last position for token ids) and float64 `probabilities` of the same shape;
    of the likeliest class its index `prediction` `[n]`, its `probability` `[n]`, and its name in `classes`, if there
    are names.
    """

    logits: Array
    probabilities: Array
    prediction: Array
    probability: Array
    classes: list[str] | None

    def __len__(self) -> int:
        return len(self.prediction)

    def __repr__(self) -> str:
        return f"Predictions of {len(self)}: {self.classes or self.prediction.tolist()}"[:120]


class Run:
    """A run directory, with everything in it built on access.

    `dir` is its path, `config` the resolved configuration, `result` the final metrics (empty while it is unfinished),
    and `metrics` every logged step.
    """

    def __init__(self, run: RunDir, checkpoint: str = "best") -> None:
        self.dir, self.checkpoint, self._run = run.path, checkpoint, run
        self._config = run.config
        self._config["paths"]["run_dir"] = str(run.path)

    def __repr__(self) -> str:
        cfg, result = self._config, self.result
        facts = [f"complete after {result.get('steps')} steps" if result else "unfinished"]
        facts += [f"{name} {value:.4g}" for name, value in sorted(result.items()) if split_of(name) == "test" and value]
        net = str((cfg["model"].get("net") or cfg["model"]).get("_target_")).rpartition(".")[2]
        return f"Run {self.dir}: {net}, {', '.join(facts)}"

    @property
    def config(self) -> DictConfig:
        """A copy of the resolved configuration."""
        config = OmegaConf.create(self._config)
        assert isinstance(config, DictConfig)
        return config

    @property
    def result(self) -> dict[str, Any]:
        """The contents of result.json; empty while the run is unfinished."""
        return self._run.result if self._run.complete else {}

    @property
    def metrics(self) -> Any:
        """metrics.csv: a pandas DataFrame if pandas is installed, else a list of dicts without missing values."""
        path = self.dir / "metrics.csv"
        require(path.is_file(), f"{self.dir} has no metrics.csv: it has not begun to train.")
        lines = read_lines(path)
        if find_spec("pandas") is not None:
            return import_module("pandas").read_csv(io.StringIO(lines.text if lines.columns else "step\n"))
        return numbers(path, lines)

    @cached_property
    def _opened(self) -> Task:
        with _untouched():
            return open_run_net(self.dir, "run", self.checkpoint, own=True)[0]

    @property
    def task(self) -> LightningModule:
        """The trained LightningModule, with the checkpoint's weights and structure, on the CPU in eval mode."""
        return self._opened.driven

    @property
    def net(self) -> nn.Module:
        """The net of the task; for a user's LightningModule, the module itself."""
        return self._opened.net

    @cached_property
    def datamodule(self) -> Any:
        """The run's data module, set up; its loaders give global batches on the CPU."""
        with _untouched():
            return open_data(self.config_dict)

    @property
    def config_dict(self) -> dict[str, Any]:
        """`config` as plain dicts and lists."""
        return copy.deepcopy(self._config)

    def predict(self, x: Any = None, resize: bool = False, batch_size: int | None = None) -> Any:
        """Predict with the run's net in its precision, as scripts/predict.py and the server do.

        Returns `Predictions`; for a user's LightningModule what its predict_step returns, as arrays by name (a tensor
        is named `prediction`).

        Args:
            x: uint8 pixels `[n, channels, height, width]`, the path of a folder, an image or a .npy file, or a list of
                paths; for a language model token ids `[n, time]`; for a user's LightningModule an array, arrays by
                name, the path of such a file, or None for its predict_dataloader
            resize: scale images of another size to the net's
            batch_size: None is the run's evaluation batch

        Raises:
            UserError: `x` does not fit the net, or the net returns NaN.
        """
        cfg = self._config
        if is_lightning(cfg):
            arrays = None if x is None else split_rows(arrays_of(x), batch_size or rows_of(cfg))
            with _untouched():
                return gather(module_outputs(self.config_dict, *self._answering, arrays), arrays)
        check_input_spec(cfg, self.dir)
        size = batch_size or rows_of(cfg)
        with _untouched():
            facts = cfg["data"]
            if is_image(cfg):
                side = facts["image_size"]
                images = Images(_files(x, facts["channels"]), (side, side), resize, size, squashed(facts))
                normalize = Normalizer(facts["mean"], facts["std"], facts["channels"])
                batches: Any = PlainLoader(images, lambda batch: normalize(torch.from_numpy(batch)))
            else:
                ids = check_tokens(np.asarray(x), facts, "x")
                batches = PlainLoader(torch.from_numpy(ids).split(size))
            task, trainer = self._answering
            configure_logging()
            outputs = trainer.predict(task, dataloaders=batches, return_predictions=True)
        logits = torch.cat([torch.as_tensor(part).float().cpu() for part in outputs or []]).numpy()
        last = logits[:, -1] if logits.ndim == 3 else logits
        try:
            shares = probabilities(last)
        except ValueError as error:
            raise UserError(f"run={self.dir}: {error}: train it again.") from error
        best = shares.argmax(axis=1)
        names = class_names(cfg) if cfg["data"].get("class_names") else None
        rows = np.arange(len(best))
        return Predictions(last, shares, best, shares[rows, best], [names[index] for index in best] if names else None)

    @cached_property
    def _answering(self) -> tuple[Task, Any]:
        """The task and Trainer that predict; not `task`, whose net must keep its device and weights."""
        cfg = self.config_dict
        cfg["trainer"] = {**cfg["trainer"], **HERE}
        return rebuild({**cfg, "strategy": AUTO, "request": {"checkpoint": self.checkpoint}})


def _files(x: Any, channels: int) -> list[ImageFile]:
    if isinstance(x, (str, Path)):
        return find_images(Path(x), channels)
    if isinstance(x, (list, tuple)) and x and all(isinstance(item, (str, Path)) for item in x):
        paths = [Path(item) for item in x]
        return [open_array(p, channels) if p.suffix.lower() == ".npy" else open_image(p, channels) for p in paths]
    pixels = np.asarray(x)
    fits = pixels.dtype == np.uint8 and pixels.ndim == 4 and pixels.shape[1] == channels and len(pixels) > 0
    actual, wanted = f"x of shape {list(pixels.shape)} and type {pixels.dtype}", f"[n, {channels}, height, width]"
    require(fits, f"{actual}: expected uint8 pixels {wanted}, or paths of pictures.")
    height, width = pixels.shape[2:]
    return [ImageFile(Path("x"), channels, (height, width), len(pixels), lambda: pixels, numbered=True)]


@contextmanager
def _untouched() -> Iterator[None]:
    """Restore random states and warning filters: building a net draws random numbers."""
    with same_numbers(), warnings.catch_warnings():
        yield
