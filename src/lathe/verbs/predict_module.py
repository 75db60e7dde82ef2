"""Predict with a user's LightningModule, by its own predict_step, or with an export of its core."""

import csv
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils import _pytree as pytree

from lathe.errors import UserError, require
from lathe.export import Array, first_line
from lathe.export.bundle import open_bundle
from lathe.export.files import whole
from lathe.runs.build import make_data
from lathe.serving.named import as_arrays
from lathe.tasks import Task
from lathe.verbs.evaluate import rebuild

INPUTS = (".npz", ".npy", ".csv", ".parquet")
OUTPUTS = (".npz", ".csv", ".parquet")
NAME = "prediction"  # of an output that is a tensor


def predict_module(cfg: dict[str, Any], folder: Path | None) -> int:
    """Write the predictions for `input`, or for the data's own predict_dataloader, to `output`; return their number.

    Args:
        cfg: the run's configuration with the request.
        folder: of an export of the core; None for the module, whose predict_step gets a tensor for an `input` with one
            array, and a dict of tensors for one with several.

    Raises:
        UserError: `input` can't be read or does not fit, or the predictions do not fit the format of `output`.
    """
    request = cfg["request"]
    arrays = None if request["input"] is None else read_arrays(Path(request["input"]))
    batches = None if arrays is None else split_rows(arrays, request["batch_size"] or batch_size(cfg))
    if folder is not None:
        require(batches is not None, "input=null: an export takes a file; name one, or leave out target.")
        bundle = open_bundle(folder)
        names = [entry["name"] for entry in bundle.manifest["inputs"]]
        outputs = []
        for batch in batches or []:
            named = dict(zip(names, batch.values(), strict=False)) if len(batch) == 1 == len(names) else batch
            outputs.append(bundle(*as_arrays(named, bundle.manifest)))
    else:
        outputs = module_outputs(cfg, *rebuild(cfg), batches)
    found = gather(outputs, batches)
    write_arrays(Path(request["output"]), found)
    count = max(len(array) for array in found.values())
    print(f"{count} predictions in {request['output']}")
    return count


def batch_size(cfg: Mapping[str, Any]) -> int:
    """Return the run's evaluation batch."""
    return int(cfg["data"].get("eval_batch_size") or cfg["data"].get("batch_size") or 64)


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
        given = [{name: torch.from_numpy(x) for name, x in batch.items()} for batch in batches]
        loader = [next(iter(batch.values())) if len(batch) == 1 else batch for batch in given]
        return list(trainer.predict(module, dataloaders=PlainLoader(loader)) or [])
    data = make_data(cfg)
    own = is_overridden("predict_dataloader", data, LightningDataModule)
    require(
        own or is_overridden("predict_dataloader", module),
        f"input=null: {type(data).__name__} has no predict_dataloader. Write one, or name a file with input=.",
    )
    owner: Any = data if own else module
    owner.predict_dataloader = _Once(owner.predict_dataloader)
    found = trainer.predict(module, datamodule=data if own else None) or []
    several = owner.predict_dataloader.several
    del owner.predict_dataloader
    return [batch for loader in found for batch in loader] if several else list(found)


class _Once:
    """A predict_dataloader hook whose loaders are plain iterables: Lightning builds DataLoaders again, and fails on
    positional arguments."""

    several = False

    def __init__(self, hook: Callable[[], Any]) -> None:
        self.hook = hook

    def __call__(self) -> Any:
        found = self.hook()
        if not isinstance(found, list | tuple | dict):
            return PlainLoader(found)
        loaders = list(found.values()) if isinstance(found, dict) else found
        self.several = len(loaders) > 1
        return [PlainLoader(loader) for loader in loaders]


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
    """Return the arrays of a file by name. A table is one float32 array `[rows, columns]` named `x`.

    Raises:
        UserError: the file can't be read, or its arrays have different numbers of rows.
    """
    suffix = path.suffix.lower()
    require(suffix in INPUTS, f"input={path}: expected a file of {', '.join(INPUTS)}.")
    try:
        if suffix == ".csv":
            found = {"x": _read_csv(path)}
        elif suffix == ".parquet":
            found = {"x": _pandas("input").read_parquet(path).to_numpy(dtype=np.float32)}
        else:
            content = np.load(path, allow_pickle=False)
            found = dict(content) if suffix == ".npz" else {"x": content}
    except UserError:
        raise
    except Exception as error:  # readers raise many types for a damaged file
        raise UserError(f"input={path} can't be read: {first_line(error)}.") from error
    sizes = {name: len(x) if x.ndim else 0 for name, x in found.items()}
    require(
        len(set(sizes.values())) == 1 and min(sizes.values()) > 0,
        f"input={path}: its arrays have {sizes or 'no'} rows: expected as many in each.",
    )
    return found


def _read_csv(path: Path) -> Array:
    """Return the numbers of a table, with or without a row of names."""
    try:
        return np.loadtxt(path, np.float32, delimiter=",", ndmin=2)
    except ValueError:
        return np.loadtxt(path, np.float32, delimiter=",", ndmin=2, skiprows=1)


def _pandas(key: str) -> Any:
    require(find_spec("pandas") is not None, f"{key}: a .parquet file needs pandas and pyarrow: pip install them.")
    return import_module("pandas")


def gather(outputs: list[Any], batches: list[dict[str, Array]] | None = None) -> dict[str, Array]:
    """Return the outputs of all batches by name: tensors of a name are concatenated.

    A tensor is named `prediction`, and those of dicts and tuples by their keys and places. A list of numbers or texts
    is an array too. Another list has an entry for each sample, which are numbered through.

    Raises:
        UserError: there are no outputs, they change between batches, are not arrays, or have other rows than `batches`.
    """
    parts: dict[str, list[Array]] = {}
    number = 0
    for batch in outputs:
        each = isinstance(batch, list) and not _is_row_list(batch)
        samples = batch if each else [batch]
        for sample in samples:
            prefix = [str(number)] if each else []
            number += 1
            for name, array in _named(sample, prefix):
                parts.setdefault(name, []).append(array)
    require(bool(parts), "predict_step returns nothing to write.")
    require(
        len({len(found) for found in parts.values()}) == 1,
        "predict_step returns other names in some batches: return the same ones, or a list.",
    )
    found = {name: np.concatenate(part) for name, part in parts.items()}
    if batches is not None and not isinstance(outputs[0], list):
        rows = sum(len(next(iter(batch.values()))) for batch in batches)
        counts = sorted({len(array) for array in found.values()})
        require(
            counts == [rows],
            f"input has {rows} rows, and the predictions {counts}: predict_step takes another batch than its arrays. "
            "Give it predict_dataloader of the data, with input=null.",
        )
    return found


def _named(tree: Any, prefix: list[str]) -> Iterator[tuple[str, Array]]:
    for path, value in pytree.tree_flatten_with_path(tree, is_leaf=_is_row_list)[0]:
        if value is None:
            continue
        words = [*prefix, *(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path)]
        array = _wide(value).cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
        require(
            array.dtype != object, f"predict_step returns a {type(value).__name__}: expected tensors, numbers or text."
        )
        yield ".".join(words) or NAME, np.atleast_1d(array)


def _is_row_list(value: Any) -> bool:
    """Return whether a list has a number or a text for each sample, such as the names of files."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, str | int | float) for one in value)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays by name to a .npz file, or as the columns of a .csv or .parquet file with a row for each sample.

    Raises:
        UserError: an array has more than two axes or another number of rows than the others, for a table.
    """
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
