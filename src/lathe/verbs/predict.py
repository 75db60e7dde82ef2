"""Predict with a run's net or one of its exports: classes of images, next tokens, outputs of a LightningModule."""

import csv
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lathe.data import Normalizer
from lathe.data.checks import first_few, squashed, warn_once
from lathe.errors import UserError, collect_errors, require
from lathe.export import Array, first_line
from lathe.export.bundle import open_bundle, whole
from lathe.images import ImageFile, LeftOut, UnreadableError, find_images, scaled
from lathe.runs.build import make_data
from lathe.runs.export_model import class_names, is_image
from lathe.runs.inference import check_input_spec, is_lightning
from lathe.runs.instantiate import locate
from lathe.serving.model import MODULE, as_arrays, describe
from lathe.tasks import Task
from lathe.verbs.evaluate import check_request, rebuild

INPUTS = (".npz", ".npy", ".csv", ".parquet")
OUTPUTS = (".npz", ".csv", ".parquet")
NAME = "prediction"  # of an output that is a tensor
BATCH = 64  # samples, for a data module that declares no batch


def predict(cfg: dict[str, Any]) -> int:
    """Write the predictions of a run's net, or of its export, for `input` to `output`; return their number."""
    request, own = cfg["request"], is_lightning(cfg)
    devices, accelerator = cfg["trainer"]["devices"], cfg["trainer"]["accelerator"]
    source = None if request["input"] is None else Path(request["input"])
    require(source is not None or own, "input is missing: name images or token ids.")
    collect_errors(
        lambda: require(devices in (1, "auto"), f"trainer.devices={devices}: prediction runs on one device."),
        lambda: require(source is None or source.exists(), f"input={source}: there is no such file or folder."),
        lambda: check_request(request, OUTPUTS if own else ()),
        lambda: None if own else check_input_spec(cfg, request["run"]),
    )
    target, manifest, folder = request["export"] or MODULE, None, None
    if target != MODULE:
        manifest = describe(cfg["paths"]["run_dir"], target, request["checkpoint"])
        folder = Path(cfg["paths"]["run_dir"], "exports", target)
        number_format = f"precision is for target={MODULE}: target={target} has that of its file; leave it out."
        require(request.get("precision") is None, number_format)
        device = f"trainer.accelerator={accelerator} is for target={MODULE}: leave it auto for target={target}."
        require(accelerator in ("auto", "cpu"), device)
    if own or source is None:
        return predict_module(cfg, folder)
    kind = getattr(locate(cfg["task"]), "predicts", "classes")
    message = f"run={request['run']}: its task predicts {kind}, and this writes classes"
    require(kind == "classes", f"{message}: take lathe.load in Python, or an export.")
    return predict_classes(cfg, source, manifest, folder)


def predict_classes(cfg: dict[str, Any], source: Path, manifest: dict[str, Any] | None, folder: Path | None) -> int:
    """Write a line for each image or sequence of `source` to a CSV file, atomically; return their number.

    Images are read batch by batch, since a folder may exceed the memory. An export has a `manifest` and a `folder`.
    """
    request, facts = cfg["request"], cfg["data"]
    batches: Any
    change: Callable[[Tensor], Tensor]
    size, images, ids = request["batch_size"] or batch_size(cfg), None, np.empty(0)
    if is_image(cfg):
        images = open_images(cfg, manifest, size)
        labels, batches, change = images.names, images, Normalizer(facts["mean"], facts["std"], facts["channels"])
    else:
        require(source.suffix.lower() == ".npy", f"input={source}: expected a .npy file of token ids [n, time].")
        ids = check_tokens(np.load(source, allow_pickle=False), facts, f"input={source}")
        labels, change = deque(map(str, range(len(ids)))), nn.Identity()
        batches = np.split(ids, range(size, len(ids), size))
    names = class_names(cfg) if facts.get("class_names") else None
    console, what = Console(), "image" if images else "sequence"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = not cfg["trainer"]["enable_progress_bar"] or not console.is_terminal
    with (
        whole(request["output"]) as path,
        open(path, "w", newline="") as file,
        Progress(*columns, console=console, disable=hidden) as progress,
    ):
        writer = csv.writer(file)
        writer.writerow([what, "prediction", "probability", *(["class"] if names else [])])
        work = progress.add_task(f"{what}s", total=images.total if images else len(ids))

        def write(logits: Array) -> None:
            last = logits[:, -1] if logits.ndim == 3 else logits
            for row in torch.from_numpy(last).double().softmax(dim=1):
                best, label = int(row.argmax()), labels.popleft()
                message = f"run={request['run']}: its net answers {label} with NaN, not with numbers: train it again."
                require(bool(row[best] == row[best]), message)
                writer.writerow([label, best, f"{float(row[best]):.6f}", *([names[best]] if names else [])])
            progress.advance(work, len(logits))

        if folder is None:
            task, trainer = rebuild({**cfg, "trainer": {**cfg["trainer"], "enable_progress_bar": False}})
            trainer.callbacks.append(WriteLogits(write))  # type: ignore[attr-defined]  # a connector sets it
            loader = PlainLoader(batches, lambda batch: change(torch.from_numpy(batch)))
            trainer.predict(task, dataloaders=loader, return_predictions=False)
        else:
            bundle = open_bundle(folder)
            for batch in batches:
                write(np.asarray(bundle(batch), dtype=np.float32))
    if images and images.left_out.files:
        skipped = first_few([file.name for file in images.left_out.files])
        warn_once(f"skip_bad={images.left_out.most} leaves out {skipped}.")
    count = images.total if images else len(ids)
    print(f"{count} predictions in {request['output']}")
    return count


class WriteLogits(Callback):
    """Pass the logits of each batch to `write`."""

    def __init__(self, write: Callable[[Array], None]) -> None:
        self.write = write

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.write(torch.as_tensor(outputs).float().cpu().numpy())


def open_images(cfg: dict[str, Any], manifest: dict[str, Any] | None, batch_size: int) -> "Images":
    """Return the requested images in the size of the run's net, or of the export with this manifest."""
    request, facts = cfg["request"], cfg["data"]
    size: tuple[int, int] | None = (facts["image_size"], facts["image_size"])
    if manifest is not None:
        height, width = manifest["input"]["shape"][2:]
        size = (height, width) if isinstance(height, int) else None
        message = f"resize=true: target={request['export']} scales images itself; leave it false."
        require(size is not None or not request["resize"], message)
    source, left_out = Path(request["input"]), LeftOut(request["skip_bad"], "skip_bad")
    files = find_images(source, facts["channels"], left_out)
    others = [name for name in left_out.others if source / name != Path(request["output"])]
    if others:
        warn_once(
            f"input={source}: {len(others)} files or folders in it are no images and are not read: {first_few(others)}."
        )
    require(bool(files), f"skip_bad={left_out.most}: nothing in input={source} can be read: mend it.")
    return Images(files, size, request["resize"], batch_size, squashed(facts), left_out)


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
        self.resize = resize
        for file in files:
            self._check(file, file.size)

    def __iter__(self) -> Iterator[Array]:
        batch: list[Array] = []
        for file in self.files:
            for name, pixels in zip(file.names, self._read(file), strict=False):
                self._check(file, pixels.shape[1:])  # the header can be wrong
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

    def _check(self, file: ImageFile, pixels: tuple[int, ...]) -> None:
        if self.size is not None and not self.resize and tuple(pixels) != self.size:
            own, wanted = (" x ".join(map(str, size)) for size in (pixels, self.size))
            message = f"input={file.path} has {own} pixels, but the net takes {wanted}: resize=true scales images."
            raise UserError(message)


def check_tokens(ids: Array, facts: dict[str, Any], name: str) -> Array:
    """Return token ids `[n, time]` as int64; raise UserError, which begins with `name`, if they do not fit the net."""
    message = f"{name} of shape {list(ids.shape)} and type {ids.dtype}: expected token ids, integers [n, time]."
    require(ids.ndim == 2 and ids.size > 0 and np.issubdtype(ids.dtype, np.integer), message)
    least, most, vocabulary, length = int(ids.min()), int(ids.max()), facts["vocab_size"], facts["length"]
    message = f"{name} holds token ids from {least} to {most}: expected 0 to {vocabulary - 1}."
    require(least >= 0 and most < vocabulary, message)
    message = f"{name} holds {ids.shape[1]} token ids in a row: expected at most {length}."
    require(ids.shape[1] <= length, message)
    return ids.astype(np.int64)


def predict_module(cfg: dict[str, Any], folder: Path | None) -> int:
    """Write the predictions for `input`, or for the data's own predict_dataloader, to `output`; return their number.

    `folder` is that of an export of the core; None is the module, whose predict_step gets a tensor for an `input` with
    one array, and a dict of tensors for one with several.
    """
    request = cfg["request"]
    arrays = None if request["input"] is None else read_arrays(Path(request["input"]))
    batches = None if arrays is None else split_rows(arrays, request["batch_size"] or batch_size(cfg))
    if folder is None:
        outputs = module_outputs(cfg, *rebuild(cfg), batches)
    else:
        if batches is None:
            raise UserError("input=null: an export takes a file; name one, or leave out target.")
        bundle, outputs = open_bundle(folder), []
        names = [entry["name"] for entry in bundle.manifest["inputs"]]
        for batch in batches:
            named = dict(zip(names, batch.values(), strict=False)) if len(batch) == 1 == len(names) else batch
            outputs.append(bundle(*as_arrays(named, bundle.manifest)))
    predictions = gather(outputs, batches)
    write_arrays(Path(request["output"]), predictions)
    count = max(len(array) for array in predictions.values())
    print(f"{count} predictions in {request['output']}")
    return count


def batch_size(cfg: Mapping[str, Any]) -> int:
    """Return the run's evaluation batch."""
    return int(cfg["data"].get("eval_batch_size") or cfg["data"].get("batch_size") or BATCH)


def split_rows(arrays: Mapping[str, Array], size: int) -> list[dict[str, Array]]:
    """Return batches of at most `size` rows of arrays by name."""
    rows = len(next(iter(arrays.values())))
    return [{name: x[i : i + size] for name, x in arrays.items()} for i in range(0, rows, size)]


def module_outputs(
    cfg: dict[str, Any], task: Task, trainer: Trainer, batches: list[dict[str, Array]] | None
) -> list[Any]:
    """Return what predict_step returns for each of the batches, or for the predict_dataloader of data or module."""
    module = task.driven
    if batches is not None:
        tensors = [{name: torch.from_numpy(x) for name, x in batch.items()} for batch in batches]
        loader = [next(iter(batch.values())) if len(batch) == 1 else batch for batch in tensors]
        try:
            return list(trainer.predict(module, dataloaders=PlainLoader(loader)) or [])
        except RuntimeError as error:
            if not any(x.dtype == np.uint8 for x in batches[0].values()):
                raise  # an error of the module
            problem = f"input holds uint8, and predict_step of {type(module).__name__} fails ({first_line(error)})"
            raise UserError(f"{problem}: give arrays of the type of its batches.") from error
    data = make_data(cfg)
    own = is_overridden("predict_dataloader", data, LightningDataModule)
    message = f"input=null: {type(data).__name__} has no predict_dataloader. Write one, or name a file with input=."
    require(own or is_overridden("predict_dataloader", module), message)
    owner: Any = data if own else module
    hook, several = owner.predict_dataloader, False

    def plain() -> Any:
        """Return the hook's loaders as plain iterables: Lightning builds DataLoaders again, and fails on some."""
        nonlocal several
        loaders = hook()
        if isinstance(loaders, dict):
            loaders = list(loaders.values())
        if not isinstance(loaders, list | tuple):
            return PlainLoader(loaders)
        several = len(loaders) > 1
        return [PlainLoader(loader) for loader in loaders]

    owner.predict_dataloader = plain
    outputs = trainer.predict(module, datamodule=data if own else None) or []
    del owner.predict_dataloader
    return [batch for loader in outputs for batch in loader] if several else list(outputs)


class PlainLoader:
    """An iterable of batches, changed, that Lightning neither builds again nor takes for several loaders."""

    def __init__(self, loader: Any, change: Callable[[Any], Any] = lambda batch: batch) -> None:
        self.loader, self.change = loader, change

    def __iter__(self) -> Iterator[Any]:
        return map(self.change, self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def arrays_of(x: Any) -> dict[str, Array]:
    """Return the arrays of a file, or a tensor or array as `x`, or several by name."""
    if isinstance(x, str | Path):
        return read_arrays(Path(x))
    return {name: np.asarray(value) for name, value in (x if isinstance(x, Mapping) else {"x": x}).items()}


def read_arrays(path: Path) -> dict[str, Array]:
    """Return the arrays of a file by name. A table is one float32 array `[rows, columns]` named `x`."""
    suffix = path.suffix.lower()
    require(suffix in INPUTS, f"input={path}: expected a file of {', '.join(INPUTS)}.")
    try:
        if suffix == ".csv":
            try:
                arrays = {"x": np.loadtxt(path, np.float32, delimiter=",", ndmin=2)}
            except ValueError:  # its first row has names
                arrays = {"x": np.loadtxt(path, np.float32, delimiter=",", ndmin=2, skiprows=1)}
        elif suffix == ".parquet":
            arrays = {"x": _pandas("input").read_parquet(path).to_numpy(dtype=np.float32)}
        else:
            content = np.load(path, allow_pickle=False)
            arrays = dict(content) if suffix == ".npz" else {"x": content}
    except UserError:
        raise
    except Exception as error:  # readers raise many types for a damaged file
        raise UserError(f"input={path} can't be read: {first_line(error)}.") from error
    sizes = {name: len(x) if x.ndim else 0 for name, x in arrays.items()}
    equal = len(set(sizes.values())) == 1 and min(sizes.values()) > 0
    require(equal, f"input={path}: its arrays have {sizes or 'no'} rows: expected as many in each.")
    return arrays


def _pandas(key: str) -> Any:
    require(find_spec("pandas") is not None, f"{key}: a .parquet file needs pandas and pyarrow: pip install them.")
    return import_module("pandas")


def gather(outputs: list[Any], batches: list[dict[str, Array]] | None = None) -> dict[str, Array]:
    """Return the outputs of all batches by name: tensors of a name are concatenated.

    A tensor is named `prediction`, and those of dicts and tuples by their keys and places. A list of numbers or texts
    is an array too. Another list has an entry for each sample, which are numbered through.
    """
    parts: dict[str, list[Array]] = {}
    number = 0
    for batch in outputs:
        each = isinstance(batch, list) and not _is_row_list(batch)
        samples = batch if each else [batch]
        for sample in samples:
            prefix = [str(number)] if each else []
            number += 1
            for path, value in pytree.tree_flatten_with_path(sample, is_leaf=_is_row_list)[0]:
                if value is None:
                    continue
                keys = (getattr(key, "key", getattr(key, "idx", getattr(key, "name", ""))) for key in path)
                if isinstance(value, Tensor):
                    half = value.dtype in (torch.bfloat16, torch.float16)
                    array = (value.float() if half else value).cpu().numpy()
                else:
                    array = np.asarray(value)
                message = f"predict_step returns a {type(value).__name__}: expected tensors, numbers or text."
                require(array.dtype != object, message)
                name = ".".join([*prefix, *map(str, keys)]) or NAME
                parts.setdefault(name, []).append(np.atleast_1d(array))
    require(bool(parts), "predict_step returns nothing to write.")
    equal = len({len(chunks) for chunks in parts.values()}) == 1
    require(equal, "predict_step returns other names in some batches: return the same ones, or a list.")
    arrays = {name: np.concatenate(part) for name, part in parts.items()}
    if batches is not None and not isinstance(outputs[0], list):
        rows = sum(len(next(iter(batch.values()))) for batch in batches)
        counts = sorted({len(array) for array in arrays.values()})
        message = (
            f"input has {rows} rows, and the predictions {counts}: predict_step takes another batch than its arrays"
        )
        require(counts == [rows], f"{message}. Give it predict_dataloader of the data, with input=null.")
    return arrays


def _is_row_list(value: Any) -> bool:
    """Return whether a list has a number or a text for each sample, such as the names of files."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, str | int | float) for item in value)


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays by name to a .npz file, or as the columns of a .csv or .parquet file with a row for each sample."""
    suffix = path.suffix.lower()
    columns: dict[str, Array] = {}
    if suffix != ".npz":
        fits = len({len(array) for array in arrays.values()}) == 1 and all(array.ndim <= 2 for array in arrays.values())
        require(fits, f"output={path}: the predictions are not one row per sample: name a .npz file.")
        for name, array in arrays.items():
            single = array.ndim == 1
            columns |= {name: array} if single else {f"{name}.{i}": array[:, i] for i in range(array.shape[1])}
    with whole(path) as temporary:
        if suffix == ".npz":
            with open(temporary, "wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
        elif suffix == ".parquet":
            _pandas("output").DataFrame(columns).to_parquet(temporary)
        else:
            with open(temporary, "w", newline="") as text:
                writer = csv.writer(text)
                writer.writerow(columns)
                writer.writerows(zip(*(array.tolist() for array in columns.values()), strict=True))
