"""The LightningDataModule of every image data set."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from lathe.config.types import Count, Name, NonNegativeInt, Positive, PositiveShare, Seed
from lathe.config.validation import validated
from lathe.data.augment import Augment
from lathe.data.base import ExactDataModule
from lathe.data.checks import check_class_names
from lathe.data.folds import check_folds, refold, with_share
from lathe.data.loader import ImageLoader, ResidentLoader
from lathe.data.normalize import Normalizer
from lathe.data.source import check_members, load_splits, using
from lathe.data.splits import Source, Split
from lathe.data.stream import StreamLoader
from lathe.data.transforms.recipe import check_folded, recipe
from lathe.data.transforms.trial import try_out
from lathe.data.workers import Workers, batches_ahead
from lathe.errors import UserError


class ImageDataModule(ExactDataModule[Split]):
    """Train, validation and test loaders over a source of images, equal on one device and on many.

    Args:
        source: where the images come from.
        num_classes: declared, and checked against the source, so that a net can be configured before any data is
            touched.
        channels: likewise.
        image_size: side in pixels, likewise.
        mean: of each channel, on a scale from 0 to 1.
        std: of each channel, on the same scale.
        batch_size: training samples per step, over all devices together.
        eval_batch_size: the same for validation and test; None takes `batch_size`.
        seed: of order and augmentation; 0 is a seed.
        augment: of training images: `Augment`, or a list of transforms and functions `(images, rng) -> images`; None is
            none.
        normalize: "batch" or "folded", as `ResidentLoader` has it.
        loader: "resident" keeps images on the device; "workers" streams them with the DataLoader settings below.
        num_workers: reading processes of "workers"; "auto" takes as many as read quickest, see `lathe.data.workers`.
        pin_memory: page-locked batches of "workers", on a GPU.
        prefetch_factor: batches each worker reads ahead; None is torch's choice.
        persistent_workers: keep workers between epochs.
        class_names: in the order of the labels, for people who read answers; None leaves them as numbers.
        folds: parts of equal class shares into which training and validation images together are divided, by the
            source's `split_seed`; None takes the source's own splits.
        fold: the part that validates; the others train.
        share: of the training images, those that are trained on; above 0.
        folder: declared for a source that reads one, which is to be this; None for others.

    Raises:
        UserError: for an unknown name, a size that is none, names that are none, another `folder` than the source's, or
            a wrong `mean` or `std` here; for facts that the source contradicts in `setup`; for batch sizes that do not
            fit the devices or the data when a loader is asked for.
    """

    @validated
    def __init__(
        self,
        source: Source,
        num_classes: Count,
        channels: Count,
        image_size: Count,
        mean: Annotated[Sequence[float], Field(min_length=1)],
        std: Annotated[Sequence[Positive], Field(min_length=1)],
        batch_size: Count,
        eval_batch_size: Count | None = None,
        seed: Seed = 0,
        augment: Augment | Sequence[Callable[..., Any]] | None = None,
        normalize: Literal["batch", "folded"] = "batch",
        loader: Literal["resident", "workers"] = "resident",
        num_workers: NonNegativeInt | Literal["auto"] = 0,
        pin_memory: bool = False,
        prefetch_factor: Count | None = None,
        persistent_workers: bool = False,
        class_names: Sequence[Name] | None = None,
        folds: Annotated[int, Field(ge=2)] | None = None,
        fold: NonNegativeInt | None = None,
        folder: Name | None = None,
        share: PositiveShare = 1.0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed)
        if loader == "workers" and normalize == "folded":
            raise UserError(
                "data.normalize=folded needs resident images: use data.normalize=batch with data.loader=workers."
            )
        check_folds(folds, fold)
        self.folds, self.fold, self.share = folds, fold, share
        check_members(source, "num_classes", "prepare", "load")
        if folder is not None and str(getattr(source, "folder", None)) != str(Path(folder)):
            raise UserError(
                f"data.folder={folder} is not what the source {type(source).__name__} reads: leave it out, or choose "
                "data=image_folder."
            )
        self.source = source
        self.num_classes = num_classes
        self.class_names = check_class_names(class_names, num_classes)
        self.channels = channels
        self.image_size = image_size
        self.mean, self.std = list(mean), list(std)
        self.augment = recipe(augment, (channels, image_size, image_size))
        if normalize == "folded":
            check_folded(self.augment)
        self.normalize = normalize
        self.loader = loader
        self._workers = Workers(num_workers if loader == "workers" else 0)
        self.reader: dict[str, Any] = {
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
        }
        Normalizer(self.mean, self.std, channels)  # a wrong mean or std is told now, not after a download

    @property
    def selects(self) -> bool:
        return True

    def prepare_data(self) -> None:
        """Lets the source fetch its data; Lightning calls it in one process per machine."""
        with using(self.source, "prepared"):
            self.source.prepare()

    def setup(self, stage: str | None = None) -> None:
        """As `ExactDataModule` has it; a fit first tries the functions that augment."""
        if stage in ("fit", None):
            device = None if self.trainer is None else self.trainer.strategy.root_device
            try_out(self.augment, (self.channels, self.image_size, self.image_size), device)
        super().setup(stage)

    def open(self) -> dict[str, Split]:
        """The source's splits, whose facts are those declared; classes that were given no names take the source's."""
        facts = {name: getattr(self, name) for name in ("num_classes", "channels", "image_size")}
        splits = load_splits(self.source, facts)
        if self.class_names is None:
            self.class_names = check_class_names(getattr(self.source, "class_names", None), self.num_classes)
        if self.folds is not None and self.fold is not None:
            splits = refold(splits, self.folds, self.fold, getattr(self.source, "split_seed", 0), self.class_names)
        if self.share < 1:
            splits = with_share(splits, self.share, getattr(self.source, "split_seed", 0))
        return {"train": splits.train, "val": splits.val, "test": splits.test}

    def first_images(self, n: int) -> torch.Tensor:
        """The first `n` training images in stored order, or all if there are fewer, normalised and not augmented:
        float32 [n, channels, image_size, image_size].
        """
        if self._splits is None:
            self.setup()
        assert self._splits is not None
        split = self._splits["train"]
        return Normalizer(self.mean, self.std, self.channels)(torch.from_numpy(split.images[split.rows[:n]]))

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Batches are made where they are wanted; any other is moved as Lightning would."""
        if isinstance(batch, tuple) and isinstance(batch[0], torch.Tensor) and batch[0].device == device:
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def build(self, split: Split, device: torch.device, **order: Any) -> ImageLoader:
        """The loader that `loader` names; images are augmented in training, unless the trainer overfits a few of
        them.
        """
        settings = self.settings(device, order)
        if self.loader == "workers":
            return self.streamed(lambda **reader: StreamLoader(split, **reader, **settings))
        images, labels = split.read()
        return ResidentLoader(torch.from_numpy(images), torch.from_numpy(labels), normalize=self.normalize, **settings)

    def streamed(self, make: Callable[..., StreamLoader]) -> StreamLoader:
        """What `make(num_workers=..., ...)` gives, by as many workers as are to read, which a trainer's first loader
        measures.
        """
        loader = make(num_workers=self._workers.taken or 0, **self.reader)
        if self._workers.taken is not None or self.trainer is None:
            return loader
        ahead = batches_ahead(self.trainer, loader.limit, loader.train, self.reader["persistent_workers"])
        self._workers.measure(loader.read, loader.rank_rows(0)[0].flatten(), loader.local_batch_size, ahead)
        return make(num_workers=self._workers.taken, **self.reader)

    def settings(self, device: torch.device, order: dict[str, Any]) -> dict[str, Any]:
        """What every `ImageLoader` is made with, beside those of the `order`."""
        augmented = order["train"] and order.get("shuffle", True)
        return {
            "num_classes": self.num_classes,
            "normalizer": Normalizer(self.mean, self.std, self.channels),
            "device": device,
            "augment": self.augment if augmented else None,
            **order,
        }
