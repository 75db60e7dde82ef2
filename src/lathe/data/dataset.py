"""The LightningDataModule of any torch Dataset or Hugging Face dataset."""

from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch.utils.data import DataLoader

from lathe.config.types import Count, Name, NonNegativeInt, OpenShare, Positive, PositiveShare, Seed
from lathe.config.validation import validated
from lathe.data.base import SPLITS, ExactDataModule
from lathe.data.checks import check_class_names, warn_missing_classes
from lathe.data.folds import check_folds, fold_rows, share_rows
from lathe.data.forms import check_pairs, form
from lathe.data.item_checks import check_image, check_target, labels_at_hand, tell_undivided
from lathe.data.item_loaders import InOrder, ItemLoader
from lathe.data.items import Collate, Items, taken
from lathe.data.iterable import EvalStream, TrainStream, is_iterable
from lathe.data.seeded import Rows, Seeded
from lathe.data.shared import read_over, seeded
from lathe.data.sized import check_batch, check_kind, count_samples
from lathe.data.source import using
from lathe.data.splits import Labels, stratified_split
from lathe.data.workers import Workers, batches_ahead
from lathe.errors import ArgumentError, UserError, require


class DatasetDataModule(ExactDataModule[Items]):
    """Train, validation and test loaders over a user's datasets, equal on any number of devices.

    Datasets have `__len__` and `__getitem__`, or are iterable. Samples are (input, target), or any that the task takes.

    Args:
        train: training dataset.
        val: validation dataset; None cuts it out of `train`.
        test: test dataset; None cuts it out of `train`.
        input: key of the input in samples that are dicts (Hugging Face); None leaves samples as they are.
        target: key of the target.
        transform: function of a training sample's input; its random draws follow from (seed, epoch, sample).
        eval_transform: the same for validation and test.
        collate_fn: makes a batch of a list of samples; None for torch's default.
        val_share: of `train`, for validation if `val` is None.
        test_share: of `train`, for the test if `test` is None.
        split_seed: of these splits, stratified if labels are at hand; independent of the run's seed.
        num_classes: checks targets that are class numbers; None for no check.
        class_names: in the order of the labels; None takes those of a Hugging Face dataset's target, if any.
        channels: of images [channels, height, width], checked; None for other inputs.
        image_size: larger side of such images in pixels, checked.
        mean: per channel, which the datasets or transforms have subtracted; for serving.
        std: per channel, that they have divided by.
        batch_size: training samples per step, over all devices together.
        eval_batch_size: the same for validation and test; None for `batch_size`.
        seed: of order and random draws.
        samples: of an epoch, if `train` is iterable; None for its length.
        folds: number of stratified folds of `train` without the test; None for a validation set.
        fold: the fold used for validation.
        share: of the training samples to train on; above 0.
        num_workers: reading processes; "auto" measures the fastest number, see `lathe.data.workers`.
        pin_memory: page-locked batches, on a GPU.
        prefetch_factor: batches that each worker reads ahead; None for torch's default.
        persistent_workers: keep workers between epochs.
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
        num_workers: NonNegativeInt | Literal["auto"] = 0,
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
        functions = {"transform": transform, "eval_transform": eval_transform, "collate_fn": collate_fn}
        for name, function in functions.items():
            if function is not None and not callable(function):
                raise ArgumentError(
                    f"{name}: expected a function or an object that can be called, got {form(function)}; a function's "
                    "node needs _partial_: true."
                )
        self.transform, self.eval_transform, self.collate_fn = transform, eval_transform, collate_fn
        self.shares = {"val": val_share, "test": test_share}
        self.split_seed = split_seed
        self.num_classes = num_classes
        if class_names is not None and num_classes is None:
            raise ArgumentError("class_names need data.num_classes: give their number too.")
        self.class_names = None if num_classes is None else check_class_names(class_names, num_classes)
        self.channels, self.image_size = channels, image_size
        self.mean, self.std = mean and list(mean), std and list(std)
        self.options: dict[str, Any] = {
            "pin_memory": pin_memory and torch.cuda.is_available(),
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
        }
        self._workers = Workers(num_workers)
        self.samples, self._undivided = samples, False
        for name, dataset in self.datasets.items():
            if name == "train" or dataset is not None:
                check_kind(name, dataset)
        self._check_iterable()

    def _check_iterable(self) -> None:
        found = {name: type(one).__name__ for name, one in self.datasets.items() if is_iterable(one)}
        for name, kind in found.items():
            if self._workers.taken:
                raise UserError(
                    f"data.num_workers={self._workers.taken}: data.{name} is iterable ({kind}) and read by one "
                    "process: use 0."
                )
            self._workers = Workers(0)
        train = self.datasets["train"]
        if "train" not in found:
            own = f"data.samples={self.samples}: data.train has a number of samples of its own: use null."
            require(self.samples is None, own)
            return
        missing = [f"data.{name}" for name, one in self.datasets.items() if one is None]
        cut = "data.folds" if self.folds is not None else f"data.share={self.share}" if self.share < 1 else None
        if missing or cut:
            what = cut or " and ".join(missing)
            raise UserError(f"{what}: nothing can be cut out of {found['train']}, which is iterable: give datasets.")
        if self.samples is None:
            if not isinstance(train, Sized):
                raise UserError(
                    f"data.train: {found['train']} is iterable and has no __len__: give data.samples, an epoch's."
                )
            self.samples = count_samples("train", train)

    @property
    def selects(self) -> bool:
        return not is_iterable(self.datasets["train"])

    def open(self) -> dict[str, Items]:
        """Return the splits, after checking their first samples."""
        rows = self._rows()
        splits = {}
        for name in SPLITS:
            source = name if self.datasets[name] is not None else "train"
            transform = self.transform if name == "train" else self.eval_transform
            splits[name] = Items(self.datasets[source], f"data.{source}", rows.get(name), self.columns, transform)
        for name, items in splits.items():
            if not is_iterable(items.dataset):  # reading a sample of an iterable would consume it
                self._check_first(name, items)
        self._take_names()
        return splits

    def _rows(self) -> dict[str, Labels]:
        """Return the rows of `train` for each split that is cut out of it."""
        train = self.datasets["train"]
        folded = self.folds is not None and self.fold is not None
        cut = [name for name in ("val", "test") if self.datasets[name] is None and not (folded and name == "val")]
        sizes = {name: max(1, round(len(train) * self.shares[name])) for name in cut}
        if not sizes and not folded and self.share == 1:
            return {}
        if sum(sizes.values()) >= len(train):
            asked = " and ".join(f"data.{name}_share={self.shares[name]}" for name in sizes)
            raise UserError(
                f"{asked} of the {len(train)} samples of data.train leave none to train on: choose less, or give "
                f"{' and '.join(f'data.{name}' for name in sizes)}."
            )
        labels = self._labels()
        rows = stratified_split(labels, sizes, self.split_seed)
        if self.folds is not None and self.fold is not None:
            kept, held_out = fold_rows(labels[rows["train"]], self.folds, self.fold, self.split_seed, self.class_names)
            rows |= {"train": rows["train"][kept], "val": rows["train"][held_out]}
        if self.share < 1:
            rows["train"] = rows["train"][share_rows(labels[rows["train"]], self.share, self.split_seed)]
        if self.num_classes is not None:
            warn_missing_classes("data.train", labels, rows, self.class_names, "add samples, or choose larger shares")
        return rows

    def _labels(self) -> Labels:
        """Return the classes that stratify `train`; all 0 if they are not known."""
        train = self.datasets["train"]
        labels = labels_at_hand(train, self.columns and self.columns[1])
        self._undivided = labels is None and self.num_classes is not None
        return np.zeros(len(train), np.int64) if labels is None else labels

    def _classes(self, split: Items) -> Labels | None:
        """Return the class numbers of a split's samples, int64 [n]; None if they are not known."""
        found = labels_at_hand(split.dataset, self.columns and self.columns[1])
        return found if found is None or split.rows is None else found[split.rows]

    def _check_first(self, name: str, items: Items) -> None:
        if not len(items):
            raise UserError(f"{items.key} has no samples: give a dataset with some.")
        with using(items.dataset, "read", items.key):
            first = Seeded(items, self.seed).__getitems__(Rows(range(min(2, len(items))), 0))
        batch = taken(self._collate(items)(first))
        if self._takes_pairs:
            check_pairs(batch, items.key)
        if self.num_classes is not None:
            check_target(batch, items, self.num_classes)
        if self._undivided and name == "train":
            tell_undivided(batch, items)
        sample = first[0]
        if self.channels is None and self.image_size is None:
            return
        declared = {"channels": self.channels, "image_size": self.image_size}
        check_image(sample, declared, items, name, str(getattr(self.trainer, "precision", "")))

    def _take_names(self) -> None:
        """Take missing class names from the dataset's target."""
        if self.class_names is None and self.num_classes is not None and self.columns is not None:
            feature = (getattr(self.datasets["train"], "features", None) or {}).get(self.columns[1])
            self.class_names = check_class_names(getattr(feature, "names", None), self.num_classes)

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
            return self._stream(split, size, train, order)
        if train:
            check_batch(size, len(split), order["world_size"])

        def made(workers: int) -> Any:
            reader = self._reader(split, size, train, workers)
            if not train:
                return InOrder(reader, **order)
            loader = ItemLoader(reader, labels=self._classes(split), **order)
            loader.even = self.collate_fn is None and self._takes_pairs
            return loader

        def read(workers: int, lists: Iterable[list[int]]) -> Iterable[Any]:
            reader = self._reader(split, size, train, workers, stay=False)
            if split.draws_nothing:
                return read_over(reader, split, lists)  # type: ignore[arg-type]
            return read_over(reader, seeded(reader, self.seed), (Rows(samples, 0) for samples in lists))

        loader = made(self._workers.taken or 0)
        if self._workers.taken is None and self.trainer is not None:
            ahead = batches_ahead(self.trainer, loader.limit, train, self.options["persistent_workers"])
            samples = loader.epoch_order(0) if train else torch.arange(len(split))
            loader = made(self._workers.measure(read, samples, max(1, size // order["world_size"]), ahead))
        return loader

    def _reader(self, split: Items, size: int, train: bool, workers: int, stay: bool = True) -> DataLoader[Any]:
        return DataLoader(
            split,  # type: ignore[arg-type]  # has the members that torch needs
            batch_size=size,
            drop_last=train,
            collate_fn=self._collate(split),  # type: ignore[arg-type]  # which gets the very list that is read
            num_workers=workers,
            pin_memory=self.options["pin_memory"],
            prefetch_factor=self.options["prefetch_factor"] if workers else None,
            persistent_workers=stay and self.options["persistent_workers"] and workers > 0,
        )

    def _stream(self, split: Items, size: int, train: bool, order: dict[str, Any]) -> Any:
        if order["world_size"] > 1:
            raise UserError(
                f"{split.key}: {type(split.dataset).__name__} is iterable and cannot be shared out exactly among "
                f"{order['world_size']} replicas: use a dataset with __getitem__ and __len__, or trainer.devices=1."
            )
        if not train:
            return EvalStream(split, self._collate(split), size, order["seed"])
        assert self.samples is not None
        return TrainStream(split, self._collate(split), self.samples, batch_size=size, **order)
