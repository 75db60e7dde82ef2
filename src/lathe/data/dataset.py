"""The LightningDataModule of any torch Dataset or Hugging Face dataset."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Annotated, Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from pydantic import Field
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from lathe.config.types import Count, Name, NonNegativeInt, OpenShare, Positive, PositiveShare, Seed
from lathe.config.validation import validated
from lathe.data.base import ExactDataModule
from lathe.data.checks import check_class_names, form, using, warn_missing_classes
from lathe.data.external import EvalStream, InOrder, SharedLoader, TrainStream, is_iterable
from lathe.data.random import Rowed, Rows, Seeded, Wrapper, draws_nothing
from lathe.data.splits import SPLITS, Labels, check_folds, fold_rows, share_rows, stratified_split
from lathe.errors import ArgumentError, UserError, require

# Dtypes that torch can compare and count with; uint16 and wider only store.
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Items(Wrapper):
    """Some rows of a dataset, as (input, target) or unchanged.

    Args:
        dataset: with `__len__` and `__getitem__`, or iterable.
        key: of the configuration, for messages.
        rows: the dataset's samples to take; None for all.
        columns: keys of input and target in samples that are dicts; None leaves samples unchanged.
        transform: of the input; of the whole sample if that is a dict and there are no `columns`.
    """

    def __init__(
        self,
        dataset: Any,
        key: str,
        rows: Labels | None = None,
        columns: tuple[str, str] | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.dataset, self.key, self.rows = dataset, key, rows
        self.columns, self.transform = columns, transform
        self.draws_nothing = transform is None and draws_nothing(dataset)

    def __len__(self) -> int:
        return len(self.dataset) if self.rows is None else len(self.rows)

    def row(self, number: int) -> int:
        """Return the index of a sample in the dataset."""
        return number if self.rows is None else int(self.rows[number])

    def name(self, number: int) -> str:
        """Return a sample's name for messages."""
        return f"{self.key}: item {self.row(number)}"

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> Rowed:
        rows = numbers if self.rows is None else self.rows[np.asarray(numbers)].tolist()
        at_once = getattr(self.dataset, "__getitems__", None)
        read: Iterable[Any] = at_once(rows) if at_once else map(self.dataset.__getitem__, rows)
        if self.columns is not None or self.transform is not None:
            read = map(self.made, read, numbers)
        samples = Rowed((), numbers)
        try:
            samples.extend(read)
        except UserError:
            raise
        except Exception as error:
            error.add_note(f"while reading {self.name(numbers[len(samples)])}")
            raise
        return samples

    def made(self, sample: Any, number: int) -> Any:
        """Return a sample of the dataset as a task takes it."""
        if self.columns is not None:
            if not isinstance(sample, Mapping) or not set(self.columns) <= set(sample):
                raise UserError(
                    f"{self.name(number)} is {form(sample)}, expected the keys {' and '.join(self.columns)}, which "
                    "data.input and data.target name."
                )
            sample = tuple(sample[name] for name in self.columns)
        if self.transform is None:
            return sample
        if isinstance(sample, (tuple, list)):
            return (self.transform(sample[0]), *sample[1:])
        return self.transform(sample)

    def labels(self) -> Labels | None:
        """Return all class numbers, int64 [n], if known without reading samples, else None."""
        labels = _labels_at_hand(self.dataset, self.columns and self.columns[1])
        return labels if labels is None or self.rows is None else labels[self.rows]


class Collate:
    """Makes a batch by `collate` (None: torch's), and checks class numbers, and with `pairs` its form."""

    def __init__(
        self, items: Items, collate: Callable[[list[Any]], Any] | None, num_classes: int | None, pairs: bool = False
    ) -> None:
        self.items, self.collate, self.num_classes, self.pairs = items, collate, num_classes, pairs
        self.draws_nothing = collate is None

    def __call__(self, samples: Rowed) -> Any:
        """Return the batch; raise UserError for samples that do not stack, and for a label that is no class."""
        if self.collate is not None:
            batch = self.collate(list(samples))
        else:
            try:
                batch = default_collate(list(samples))
            except Exception as error:  # torch raises many types here
                numbered = zip(samples, samples.rows, strict=True)
                kinds = {form(sample): self.items.row(number) for sample, number in numbered}
                listed = ", ".join(f"item {row} is {kind}" for kind, row in [*kinds.items()][:2])
                raise UserError(
                    f"{self.items.key}: samples make no batch ({error}), {listed}: use data.transform, "
                    "data.eval_transform or data.collate_fn to make them alike."
                ) from error
        if self.pairs:
            check_pairs(batch, self.items.key)
        if self.num_classes is None or not isinstance(batch, (tuple, list)) or len(batch) != 2:
            return batch
        x, y = batch
        if not isinstance(y, Tensor) or y.dtype not in INTEGERS:
            return [x, y.long()] if isinstance(y, Tensor) and y.dtype == torch.bool and y.ndim == 1 else batch
        low, high = y.aminmax()
        if low < 0 or high >= self.num_classes:
            wrong = (y < 0) | (y >= self.num_classes)
            row = int(wrong.nonzero()[0, 0]) if y.ndim and len(y) == len(samples) else 0
            raise UserError(
                f"{self.items.name(samples.rows[row])} has the label {int(y[wrong][0])}, expected 0 to "
                f"{self.num_classes - 1} as data.num_classes={self.num_classes} says."
            )
        return [x, y.long()]


def check_pairs(batch: Any, key: str) -> None:
    """Raise UserError if a batch is not inputs and targets; warn if it has more than these."""
    if isinstance(batch, Mapping):
        names = ", ".join(map(str, batch))
        raise UserError(f"{key}: samples have the keys {names}: name two in data.input and data.target.")
    require(
        isinstance(batch, (tuple, list)) and len(batch) >= 2 and not isinstance(batch[0], str),
        f"{key}: a batch is {form(batch)}, expected inputs and their targets: give (input, target), or write a task of "
        "your own for samples like these.",
    )
    if len(batch) > 2:
        rank_zero_warn(f"{key}: samples have {len(batch)} parts; the task uses the first two, input and target.")


def _labels_at_hand(dataset: Any, target: str | None) -> Labels | None:
    if isinstance(dataset, Subset):
        inner = _labels_at_hand(dataset.dataset, target)
        return None if inner is None else inner[np.asarray(dataset.indices, dtype=np.int64)]
    values: Any = None
    if isinstance(dataset, TensorDataset):
        values = dataset.tensors[-1]
    elif target is not None and target in (getattr(dataset, "column_names", None) or ()):
        values = dataset[target]
    else:
        values = next(
            (value for name in ("targets", "labels") if (value := getattr(dataset, name, None)) is not None), None
        )
    try:
        labels = np.asarray(values[:] if hasattr(values, "__getitem__") else values)
    except (TypeError, ValueError):
        return None
    return labels.astype(np.int64) if labels.shape == (len(dataset),) and labels.dtype.kind in "iu" else None


class DatasetDataModule(ExactDataModule[Items]):
    """Train, validation and test loaders over a user's datasets, equal on any number of devices.

    Datasets have `__len__` and `__getitem__`, or are iterable. Samples are (input, target), or any that the task takes.

    The arguments are the keys of configs/data/dataset.yaml, which describes them.
    """

    @validated
    def __init__(
        self,
        train: Any,
        val: Any = None,
        test: Any = None,
        input: Name | None = None,  # noqa: A002 (the key in the configuration)
        target: Name | None = None,
        transform: Callable[[Any], Any] | None = None,
        eval_transform: Callable[[Any], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        val_share: OpenShare = 0.1,
        test_share: OpenShare = 0.1,
        split_seed: Seed = 0,
        num_classes: Count | None = None,
        class_names: Sequence[Name] | None = None,
        channels: Count | None = None,
        image_size: Count | None = None,
        mean: Annotated[Sequence[float], Field(min_length=1)] | None = None,
        std: Annotated[Sequence[Positive], Field(min_length=1)] | None = None,
        batch_size: Count = 64,
        eval_batch_size: Count | None = None,
        seed: Seed = 0,
        samples: Count | None = None,
        folds: Annotated[int, Field(ge=2)] | None = None,
        fold: NonNegativeInt | None = None,
        num_workers: NonNegativeInt | None = None,
        pin_memory: bool = False,
        prefetch_factor: Count | None = None,
        persistent_workers: bool = False,
        share: PositiveShare = 1.0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed)
        self.datasets = {"train": train, "val": val, "test": test}
        check_folds(folds, fold)
        self.folds, self.fold, self.share = folds, fold, share
        if folds is not None and val is not None:
            raise ArgumentError(f"folds={folds} divides data.train: let data.val be null, or data.folds.")
        if (input is None) != (target is None):
            raise ArgumentError(f"input={input} and target={target} go together: name both, or neither.")
        self.columns = None if input is None or target is None else (input, target)
        self.transform, self.eval_transform, self.collate_fn = transform, eval_transform, collate_fn
        self.shares = {"val": val_share, "test": test_share}
        self.split_seed = split_seed
        self.num_classes = num_classes
        if class_names is not None and num_classes is None:
            raise ArgumentError("class_names need data.num_classes: give their number too.")
        self.class_names = None if num_classes is None else check_class_names(class_names, num_classes)
        self.channels, self.image_size = channels, image_size
        self.mean, self.std = mean and list(mean), std and list(std)
        workers = num_workers or 0  # not the cores: a user's dataset may not survive a fork, such as an open HDF5 file
        self.options: dict[str, Any] = {
            "num_workers": workers,
            "pin_memory": pin_memory and torch.cuda.is_available(),
            "prefetch_factor": prefetch_factor if workers else None,
            "persistent_workers": persistent_workers and workers > 0,
        }
        self.samples = samples
        for name, dataset in self.datasets.items():
            if dataset is not None and not is_iterable(dataset):
                sized = hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)
                require(sized, f"data.{name}: {form(dataset)} has no __len__ and __getitem__, which a dataset needs.")
        self._check_iterable()

    def _check_iterable(self) -> None:
        iterable = [name for name, dataset in self.datasets.items() if is_iterable(dataset)]
        if iterable:
            workers = self.options["num_workers"]
            require(workers == 0, f"data.num_workers={workers}: data.{iterable[0]} is iterable, so use 0.")
        if "train" not in iterable:
            require(self.samples is None, f"data.samples={self.samples} is for an iterable data.train: use null.")
            return
        require(
            None not in self.datasets.values() and self.folds is None and self.share == 1,
            "data.train is iterable, and nothing can be cut out of it: give data.val and data.test, without data.folds "
            "and data.share.",
        )
        if self.samples is None:
            train = self.datasets["train"]
            sized = isinstance(train, Sized)
            require(sized, "data.train is iterable and has no __len__: set data.samples, the length of an epoch.")
            self.samples = len(train)

    @property
    def selects(self) -> bool:
        return not is_iterable(self.datasets["train"])

    def open(self) -> dict[str, Items]:
        """Return the splits, after checking their first samples."""
        rows, splits = self._rows(), {}
        for name in SPLITS:
            source = name if self.datasets[name] is not None else "train"
            transform = self.transform if name == "train" else self.eval_transform
            splits[name] = Items(self.datasets[source], f"data.{source}", rows.get(name), self.columns, transform)
        for name, items in splits.items():
            if not is_iterable(items.dataset):  # reading a sample of an iterable would consume it
                self._check_first(name, items)
        if self.class_names is None and self.num_classes is not None and self.columns is not None:
            feature = (getattr(self.datasets["train"], "features", None) or {}).get(self.columns[1])
            self.class_names = check_class_names(getattr(feature, "names", None), self.num_classes)
        return splits

    def _rows(self) -> dict[str, Labels]:
        """Return the rows of `train` for each split that is cut out of it."""
        train = self.datasets["train"]
        cut = [
            name for name in ("val", "test") if self.datasets[name] is None and (self.folds is None or name != "val")
        ]
        if not cut and self.folds is None and self.share == 1:
            return {}
        sizes = {name: max(1, round(len(train) * self.shares[name])) for name in cut}
        shares = " and ".join(f"data.{name}_share={self.shares[name]}" for name in sizes)
        require(
            sum(sizes.values()) < len(train),
            f"{shares} of the {len(train)} samples of data.train leave none to train on: choose less.",
        )
        stored = _labels_at_hand(train, self.columns and self.columns[1])
        labels = np.zeros(len(train), np.int64) if stored is None else stored
        rows = stratified_split(labels, sizes, self.split_seed)
        if self.folds is not None and self.fold is not None:
            train_rows, val_rows = fold_rows(
                labels[rows["train"]], self.folds, self.fold, self.split_seed, self.class_names
            )
            rows |= {"train": rows["train"][train_rows], "val": rows["train"][val_rows]}
        if self.share < 1:
            rows["train"] = rows["train"][share_rows(labels[rows["train"]], self.share, self.split_seed)]
        if self.num_classes is not None:
            warn_missing_classes("data.train", labels, rows, self.class_names, "add samples, or choose larger shares")
        return rows

    def _check_first(self, name: str, items: Items) -> None:
        """Raise UserError if a split's first samples make no batch for the task, or are not as declared."""
        require(len(items) > 0, f"{items.key} has no samples: give a dataset with some.")
        with using(items.dataset, "read", items.key):
            first = Seeded(items, self.seed).__getitems__(Rows(range(min(2, len(items))), 0))
        batch, classes = self._collate(items)(first), self.num_classes
        if self._takes_pairs:
            check_pairs(batch, items.key)
        if classes is not None and isinstance(batch, (tuple, list)) and len(batch) == 2:
            y = batch[1]
            scores = isinstance(y, Tensor) and y.ndim > 1 and y.shape[1] == classes
            numbers = isinstance(y, Tensor) and y.dtype in INTEGERS and not (y.ndim == 2 and y.shape[1] == 1)
            got = f"a list of {form(y[0])}" if isinstance(y, (tuple, list)) and len(y) else form(y)
            require(
                scores or numbers,
                f"{items.key}: targets of a batch are {got}, expected a whole number from 0 to {classes - 1}, or "
                f"{classes} scores of classes, as data.num_classes={classes} says: change the targets, or set "
                "data.num_classes=null for a task that takes them so.",
            )
            is_cut = name == "train" and items.rows is not None
            if is_cut and y.ndim == 1 and not y.is_floating_point() and items.labels() is None:
                rank_zero_warn(
                    f"{items.key}: {type(items.dataset).__name__} has no labels at hand (an attribute targets or "
                    "labels), so it is divided without regard to its classes."
                )
        if self.channels is None and self.image_size is None:
            return
        sample = first[0]
        image: Any = sample[0] if isinstance(sample, (tuple, list)) else None
        require(
            len(getattr(image, "shape", ())) == 3,
            f"{items.name(0)} is {form(sample)}, expected an image [channels, height, width] and its target, as "
            "data.channels and data.image_size say: set both to null for other inputs.",
        )
        require(
            "float" in str(image.dtype),
            f"{items.name(0)} is an image of {image.dtype}, expected float32: convert it in the dataset or by "
            f"data.{'' if name == 'train' else 'eval_'}transform, pixels / 255 less data.mean over data.std.",
        )
        declared = {"channels": self.channels, "image_size": self.image_size}
        for key, value in {"channels": image.shape[0], "image_size": max(image.shape[1:])}.items():
            require(
                declared[key] in (None, value),
                f"data.{key}={declared[key]} is not what {items.name(0)} has, which is {form(image)}: set "
                f"data.{key}={value}, or change the transform of {name}.",
            )

    def _collate(self, items: Items) -> Collate:
        # the first samples of a stream are not checked beforehand
        return Collate(items, self.collate_fn, self.num_classes, is_iterable(items.dataset) and self._takes_pairs)

    @property
    def _takes_pairs(self) -> bool:
        """Return whether the run's task takes exactly inputs and targets."""
        task = getattr(self.trainer, "lightning_module", None)
        return bool(getattr(task, "takes_pairs", False))

    def build(self, split: Items, device: torch.device, **order: Any) -> Any:
        """Return a loader of batches, which are moved to the device later."""
        size, train = order.pop("batch_size"), order.pop("train")
        if is_iterable(split.dataset):
            if not train:
                return EvalStream(split, self._collate(split), size, **order)
            assert self.samples is not None
            return TrainStream(split, self._collate(split), self.samples, batch_size=size, **order)

        reader: DataLoader[Any] = DataLoader(
            split,
            batch_size=size,
            drop_last=train,
            collate_fn=self._collate(split),  # type: ignore[arg-type]  # which gets the very list that is read
            **self.options,
        )
        if not train:
            return InOrder(reader, **order)
        shared = SharedLoader(reader, labels=split.labels(), **order)
        shared.even = self.collate_fn is None and self._takes_pairs
        return shared
