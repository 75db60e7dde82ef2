"""Predict with a run's net or one of its exports: classes of images, next tokens, outputs of a LightningModule."""

import csv
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from lathe.data import Normalizer
from lathe.data.checks import first_few, squashed, warn_once
from lathe.errors import UserError, collect_errors, require
from lathe.export.bundle import open_bundle
from lathe.export.files import whole
from lathe.images import ImageFile, LeftOut, UnreadableError, find_images, scaled
from lathe.runs.export_model import class_names, is_image
from lathe.runs.inference import check_input_spec, is_lightning
from lathe.runs.instantiate import locate
from lathe.serving.model import MODULE, describe
from lathe.verbs.evaluate import check_request, rebuild
from lathe.verbs.predict_module import OUTPUTS, PlainLoader, predict_module

BATCH = 64  # images, for a data module that declares no batch
Array = np.ndarray[Any, Any]
Write = Callable[[Array], None]


def predict(cfg: dict[str, Any]) -> int:
    """Write a line for each image or sequence of `input` to the CSV file `output`, and return their number.

    The file is written atomically. Images are read batch by batch, since a folder may exceed the memory. For a user's
    LightningModule see `predict_module`.
    """
    request, own = cfg["request"], is_lightning(cfg)
    devices, target = cfg["trainer"]["devices"], request["export"] or MODULE
    given = None if request["input"] is None else Path(request["input"])
    require(given is not None or own, "input is missing: name images or token ids.")
    collect_errors(
        lambda: require(devices in (1, "auto"), f"trainer.devices={devices}: prediction runs on one device."),
        lambda: require(given is None or given.exists(), f"input={given}: there is no such file or folder."),
        lambda: check_request(request, OUTPUTS if own else ()),
        lambda: None if own else check_input_spec(cfg, request["run"]),
    )
    manifest = None if target == MODULE else check_export(cfg)
    if own:
        return predict_module(cfg, None if manifest is None else folder_of(cfg))
    kind = getattr(locate(cfg["task"]), "predicts", "classes")
    require(
        kind == "classes",
        f"run={request['run']}: its task predicts {kind}, and this writes classes: take lathe.load in Python, or an "
        "export.",
    )
    batch_size = request["batch_size"] or cfg["data"].get("eval_batch_size") or cfg["data"].get("batch_size") or BATCH
    if is_image(cfg):
        source: Images | Tokens = open_images(cfg, manifest, batch_size)
    else:
        source = Tokens(read_tokens(Path(request["input"]), cfg["data"]), batch_size)
    names = class_names(cfg) if cfg["data"].get("class_names") else None
    with (
        whole(request["output"]) as path,
        open(path, "w", newline="") as file,
        bar(cfg["trainer"]["enable_progress_bar"]) as progress,
    ):
        writer = csv.writer(file)
        writer.writerow([source.what, "prediction", "probability", *(["class"] if names else [])])
        work = progress.add_task(f"{source.what}s", total=source.total)

        def write(logits: Array) -> None:
            last = logits[:, -1] if logits.ndim == 3 else logits
            for row in torch.from_numpy(last).double().softmax(dim=1):
                best, label = int(row.argmax()), source.names.popleft()
                require(
                    bool(row[best] == row[best]),
                    f"run={request['run']}: its net answers {label} with NaN, not with numbers: train it again.",
                )
                chosen = [names[best]] if names else []
                writer.writerow([label, best, f"{float(row[best]):.6f}", *chosen])
            progress.advance(work, len(logits))

        (run_module if target == MODULE else run_export)(cfg, source, write)
    if isinstance(source, Images) and source.left_out.files:
        skipped = first_few([file.name for file in source.left_out.files])
        warn_once(f"skip_bad={source.left_out.most} leaves out {skipped}.")
    print(f"{source.total} predictions in {request['output']}")
    return source.total


def open_images(cfg: dict[str, Any], manifest: dict[str, Any] | None, batch_size: int) -> "Images":
    """Return the requested images in the size of the run's net, or of the export with this manifest."""
    request, facts = cfg["request"], cfg["data"]
    size: tuple[int, int] | None = (facts["image_size"], facts["image_size"])
    if manifest is not None:
        height, width = manifest["input"]["shape"][2:]
        size = (height, width) if isinstance(height, int) else None
        require(
            size is not None or not request["resize"],
            f"resize=true: target={request['export']} scales images itself; leave it false.",
        )
    given, left_out = Path(request["input"]), LeftOut(request["skip_bad"], "skip_bad")
    files = find_images(given, facts["channels"], left_out)
    others = [name for name in left_out.others if Path(request["input"], name) != Path(request["output"])]
    if others:
        told = f"{len(others)} files or folders in it are no images and are not read"
        warn_once(f"input={request['input']}: {told}: {first_few(others)}.")
    require(bool(files), f"skip_bad={left_out.most}: nothing in input={request['input']} can be read: mend it.")
    return Images(files, size, request["resize"], batch_size, squashed(facts), left_out)


class Tokens:
    """Iterate over int64 batches `[batch, time]` of token ids."""

    what = "sequence"

    def __init__(self, ids: Array, batch_size: int) -> None:
        self.ids, self.batch_size, self.total = ids, batch_size, len(ids)
        self.names = deque(map(str, range(len(ids))))

    def __iter__(self) -> Iterator[Array]:
        for start in range(0, len(self.ids), self.batch_size):
            yield self.ids[start : start + self.batch_size]


def read_tokens(path: Path, facts: dict[str, Any]) -> Array:
    """Return the token ids of a .npy file; raise UserError if they do not fit the net."""
    require(path.suffix.lower() == ".npy", f"input={path}: expected a .npy file of token ids [n, time].")
    return check_tokens(np.load(path, allow_pickle=False), facts, f"input={path}")


def check_tokens(ids: Array, facts: dict[str, Any], name: str) -> Array:
    """Return token ids `[n, time]` as int64; raise UserError, which begins with `name`, if they do not fit the net."""
    require(
        ids.ndim == 2 and ids.size > 0 and np.issubdtype(ids.dtype, np.integer),
        f"{name} of shape {list(ids.shape)} and type {ids.dtype}: expected token ids, integers [n, time].",
    )
    require(
        int(ids.min()) >= 0 and int(ids.max()) < facts["vocab_size"],
        f"{name} holds token ids from {ids.min()} to {ids.max()}: expected 0 to {facts['vocab_size'] - 1}.",
    )
    require(
        ids.shape[1] <= facts["length"],
        f"{name} holds {ids.shape[1]} token ids in a row: expected at most {facts['length']}.",
    )
    return ids.astype(np.int64)


def bar(shown: bool) -> Progress:
    """Build a progress bar that counts images, shown only on a terminal."""
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not shown or not console.is_terminal)


class Images:
    """Iterate over uint8 batches `[batch, channels, height, width]` of images of `size`.

    If `size` is None, images keep theirs, and a batch ends where it changes. `resize` scales others to `size`: the
    centre crop, or the whole image with `squash`. The consumer pops the names of yielded images from `names`.
    """

    what = "image"

    def __init__(
        self,
        files: list[ImageFile],
        size: tuple[int, int] | None,
        resize: bool,
        batch_size: int,
        squash: bool = False,
        left_out: LeftOut | None = None,
    ) -> None:
        self.squash, self.left_out = squash, left_out or LeftOut()
        self.names = deque[str]()
        self.files, self.size, self.batch_size = files, size, batch_size
        self.total = sum(file.count for file in files)
        for file in files:
            check_size(file, file.size, size if not resize else None)
        self.resize = resize

    def __iter__(self) -> Iterator[Array]:
        batch: list[Array] = []
        for file in self.files:
            for name, pixels in zip(file.names, self._read(file), strict=False):
                check_size(file, pixels.shape[1:], self.size if not self.resize else None)  # the header can be wrong
                fitting = pixels if self.size is None else scaled(pixels, self.size, self.squash)
                if batch and (len(batch) == self.batch_size or batch[0].shape != fitting.shape):
                    yield np.stack(batch)
                    batch = []
                batch.append(fitting)
                self.names.append(name)
        require(bool(batch), f"skip_bad={self.left_out.most}: no image of the input can be read: mend it.")
        yield np.stack(batch)

    def _read(self, file: ImageFile) -> Iterator[Array]:
        try:
            yield from file.read()
        except UnreadableError as error:
            self.left_out.add(file.path, error)
            self.total -= file.count


def check_size(file: ImageFile, found: tuple[int, ...], size: tuple[int, int] | None) -> None:
    """Raise UserError for images of a size other than `size`; None accepts all."""
    if size is not None and tuple(found) != size:
        raise UserError(
            f"input={file.path} has {found[0]} x {found[1]} pixels, but the net takes {size[0]} x {size[1]}: "
            "resize=true scales images."
        )


def run_module(cfg: dict[str, Any], source: Images | Tokens, write: Write) -> None:
    """Predict with the run's net, on the device and in the precision of `cfg`."""
    facts = cfg["data"]
    task, trainer = rebuild({**cfg, "trainer": {**cfg["trainer"], "enable_progress_bar": False}})
    trainer.callbacks.append(Written(write))  # type: ignore[attr-defined]
    normalize = (
        nn.Identity() if isinstance(source, Tokens) else Normalizer(facts["mean"], facts["std"], facts["channels"])
    )
    batches = PlainLoader(source, lambda batch: normalize(torch.from_numpy(batch)))
    trainer.predict(task, dataloaders=batches, return_predictions=False)


class Written(Callback):
    """Pass the logits of each batch to `write`."""

    def __init__(self, write: Write) -> None:
        self.write = write

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.write(torch.as_tensor(outputs).float().cpu().numpy())


def check_export(cfg: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of the run's export; raise UserError if it does not fit the request."""
    request, target, accelerator = cfg["request"], cfg["request"]["export"], cfg["trainer"]["accelerator"]
    found = describe(cfg["paths"]["run_dir"], target, request["checkpoint"])
    require(
        request.get("precision") is None,
        f"precision is for target={MODULE}: target={target} has the number format of its file; leave it out.",
    )
    require(
        accelerator in ("auto", "cpu"),
        f"trainer.accelerator={accelerator} is for target={MODULE}: target={target} runs where its runtime does; "
        "leave it auto.",
    )
    return found


def run_export(cfg: dict[str, Any], source: Images | Tokens, write: Write) -> None:
    """Predict with the export."""
    bundle = open_bundle(folder_of(cfg))
    for batch in source:
        write(np.asarray(bundle(batch), dtype=np.float32))


def folder_of(cfg: dict[str, Any]) -> Path:
    """Return the folder of the requested export."""
    return Path(cfg["paths"]["run_dir"]) / "exports" / str(cfg["request"]["export"])
