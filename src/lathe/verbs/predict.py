"""Classify images of any folder with a run's net or one of its exports."""

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

from lathe import export
from lathe.data import Normalizer
from lathe.data.checks import first_few, squashed, warn_once
from lathe.errors import UserError, collect_errors, require
from lathe.export import manifest as manifests
from lathe.export.bundle import open_bundle
from lathe.export.files import whole
from lathe.images.files import ImageFile, LeftOut, UnreadableError, find_images
from lathe.images.pictures import scaled
from lathe.runs.export_model import class_names, is_image
from lathe.runs.export_staleness import check_current
from lathe.runs.inference import check_input_spec
from lathe.runs.instantiate import locate
from lathe.runs.rundir import RunDir
from lathe.verbs.evaluate import check_request, rebuild

MODULE = "module"
BATCH = 64  # images, for a data module that declares no batch
Array = np.ndarray[Any, Any]
Write = Callable[[Array], None]


def predict(cfg: dict[str, Any]) -> int:
    """Write a line for each image of `input` to the CSV file `output`, and return the number of images.

    The file is written atomically. Images are read batch by batch, since a folder may exceed the memory.
    """
    request, facts = cfg["request"], cfg["data"]
    devices, target = cfg["trainer"]["devices"], request["export"] or MODULE
    given = Path(request["input"])
    collect_errors(
        lambda: require(devices in (1, "auto"), f"trainer.devices={devices}: prediction runs on one device."),
        lambda: require(given.exists(), f"input={given}: there is no such file or folder."),
        lambda: check_request(request),
        lambda: check_input_spec(cfg, request["run"]),
    )
    require(
        is_image(cfg),
        f"run={request['run']}: its data are not images, and prediction takes images: choose another run.",
    )
    size: tuple[int, int] | None = (facts["image_size"], facts["image_size"])
    if target != MODULE:
        size = check_export(cfg)
        require(
            size is not None or not request["resize"],
            f"resize=true: target={target} scales images itself; leave it false.",
        )
    kind = getattr(locate(cfg["task"]), "predicts", "classes")
    require(
        kind == "classes",
        f"run={request['run']}: its task predicts {kind}, and this writes classes of images: take lathe.load in "
        "Python, or an export.",
    )
    left_out = LeftOut(request["skip_bad"], "skip_bad")
    files = find_images(given, facts["channels"], left_out)
    others = [name for name in left_out.others if Path(request["input"], name) != Path(request["output"])]
    if others:
        told = f"{len(others)} files or folders in it are no images and are not read"
        warn_once(f"input={request['input']}: {told}: {first_few(others)}.")
    require(bool(files), f"skip_bad={left_out.most}: nothing in input={request['input']} can be read: mend it.")
    batch_size = request["batch_size"] or facts.get("eval_batch_size") or facts.get("batch_size") or BATCH
    images = Images(files, size, request["resize"], batch_size, squashed(facts), left_out)
    names = class_names(cfg) if facts.get("class_names") else None
    run = run_module if target == MODULE else run_export
    with (
        whole(request["output"]) as path,
        open(path, "w", newline="") as file,
        bar(cfg["trainer"]["enable_progress_bar"]) as progress,
    ):
        writer = csv.writer(file)
        writer.writerow(["image", "prediction", "probability", *(["class"] if names else [])])
        work = progress.add_task("images", total=images.total)

        def write(logits: Array) -> None:
            for row in torch.from_numpy(logits).double().softmax(dim=1):
                best, label = int(row.argmax()), images.names.popleft()
                require(
                    bool(row[best] == row[best]),
                    f"run={request['run']}: its net answers {label} with NaN, not with numbers: train it again.",
                )
                chosen = [names[best]] if names else []
                writer.writerow([label, best, f"{float(row[best]):.6f}", *chosen])
            progress.advance(work, len(logits))

        run(cfg, images, write)
    if left_out.files:
        warn_once(f"skip_bad={left_out.most} leaves out {first_few([file.name for file in left_out.files])}.")
    print(f"{images.total} predictions in {request['output']}")
    return images.total


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


def run_module(cfg: dict[str, Any], images: Images, write: Write) -> None:
    """Predict with the run's net, on the device and in the precision of `cfg`."""
    facts = cfg["data"]
    task, trainer = rebuild({**cfg, "trainer": {**cfg["trainer"], "enable_progress_bar": False}})
    trainer.callbacks.append(Written(write))  # type: ignore[attr-defined]
    batches = Normalized(images, Normalizer(facts["mean"], facts["std"], facts["channels"]))
    trainer.predict(task, dataloaders=batches, return_predictions=False)


class Normalized:
    """The batches of `images`, normalized for the net: float32 of the same shape."""

    def __init__(self, images: Images, normalizer: Normalizer) -> None:
        self.images, self.normalizer = images, normalizer

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in self.images:
            yield self.normalizer(torch.from_numpy(batch))


class Written(Callback):
    """Pass the logits of each batch to `write`."""

    def __init__(self, write: Write) -> None:
        self.write = write

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.write(torch.as_tensor(outputs).float().cpu().numpy())


def check_export(cfg: dict[str, Any]) -> tuple[int, int] | None:
    """Return the height and width of the images that the run's export takes; None for any."""
    request, target = cfg["request"], cfg["request"]["export"]
    require(
        target in export.TARGETS,
        f"target={target} is unknown: choose {MODULE}, or one that the run was exported to, of "
        f"{', '.join(export.TARGETS)}.",
    )
    found = manifests.read(folder_of(cfg))
    asked, precision, accelerator = request["checkpoint"], request.get("precision"), cfg["trainer"]["accelerator"]
    require(
        found["checkpoint"] == asked,
        f"checkpoint={asked}: target={target} was exported from {found['checkpoint']}.ckpt; "
        f"say checkpoint={found['checkpoint']}, or export the other.",
    )
    check_current(RunDir(cfg["paths"]["run_dir"]), target, found)
    require(
        precision is None,
        f"precision is for target={MODULE}: target={target} has the number format of its file; leave it out.",
    )
    require(
        accelerator in ("auto", "cpu"),
        f"trainer.accelerator={accelerator} is for target={MODULE}: target={target} runs where its runtime does; "
        "leave it auto.",
    )
    height, width = found["input"]["shape"][2:]
    return (height, width) if isinstance(height, int) else None


def run_export(cfg: dict[str, Any], images: Images, write: Write) -> None:
    """Predict with the export."""
    bundle = open_bundle(folder_of(cfg))
    for batch in images:
        write(np.asarray(bundle(batch), dtype=np.float32))


def folder_of(cfg: dict[str, Any]) -> Path:
    """Return the folder of the requested export."""
    return Path(cfg["paths"]["run_dir"]) / "exports" / str(cfg["request"]["export"])
