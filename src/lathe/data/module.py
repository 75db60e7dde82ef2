"""The LightningDataModule of every image data set."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from lathe.config.types import Count, Name, NonNegativeInt, Positive, PositiveShare, Seed
from lathe.config.validation import validated
from lathe.data.augment import Augment, Normalizer
from lathe.data.base import ExactDataModule
from lathe.data.checks import check_class_names, check_members
from lathe.data.loader import ImageLoader, ResidentLoader, StreamLoader
from lathe.data.recipe import check_folded, recipe, try_out
from lathe.data.splits import Source, Split, check_folds, load_splits, refold, with_share
from lathe.data.transfer import needs_no_trainer
from lathe.data.workers import batches_ahead, measure_workers
from lathe.errors import UserError


class ImageDataModule(ExactDataModule[Split]):
    """Train, validation and test loaders over a source of images, equal on any number of devices.

    The arguments are the keys of configs/data/image_folder.yaml, which describes them. `augment` is an `Augment`, or a
    list of transforms and functions `(images, rng) -> images`.
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
        self.num_workers = num_workers if loader == "workers" else 0
        self.reader: dict[str, Any] = {
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
        }
        Normalizer(self.mean, self.std, channels)  # raises for a wrong mean or std before a download

    @property
    def selects(self) -> bool:
        return True

    def setup(self, stage: str | None = None) -> None:
        """Open the data; a fit first tests the user's augmentation functions."""
        if stage in ("fit", None):
            device = None if self.trainer is None else self.trainer.strategy.root_device
            try_out(self.augment, (self.channels, self.image_size, self.image_size), device)
        super().setup(stage)

    def open(self) -> dict[str, Split]:
        """Return the source's splits, checked; take missing class names from the source."""
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
        """Return the first `n` training images, normalized: float32 [n, channels, height, width]."""
        split = self.opened["train"]
        return Normalizer(self.mean, self.std, self.channels)(torch.from_numpy(split.images[split.rows[:n]]))

    @needs_no_trainer
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return a batch on `device` unchanged; move any other as Lightning does."""
        if isinstance(batch, tuple) and isinstance(batch[0], torch.Tensor) and batch[0].device == device:
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def build(self, split: Split, device: torch.device, **order: Any) -> ImageLoader:
        """Return the loader that `loader` names; training augments unless the trainer overfits."""
        settings = self.settings(device, order)
        if self.loader == "workers":
            return self.streamed(lambda **reader: StreamLoader(split, **reader, **settings))
        images, labels = split.read()
        return ResidentLoader(torch.from_numpy(images), torch.from_numpy(labels), normalize=self.normalize, **settings)

    def streamed(self, make: Callable[..., StreamLoader]) -> StreamLoader:
        """Call `make` with the number of workers, which a trainer's first loader measures."""
        if self.num_workers != "auto":
            return make(num_workers=self.num_workers, **self.reader)
        loader = make(num_workers=0, **self.reader)
        if self.trainer is None:
            return loader
        ahead = batches_ahead(self.trainer, loader.limit, loader.train, self.reader["persistent_workers"])
        samples = loader.rank_rows(0)[0].flatten()
        self.num_workers = measure_workers(loader.read, samples, loader.local_batch_size, ahead)
        return make(num_workers=self.num_workers, **self.reader)

    def settings(self, device: torch.device, order: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of every `ImageLoader`, together with those of `order`."""
        augmented = order["train"] and order.get("shuffle", True)
        return {
            "num_classes": self.num_classes,
            "normalizer": Normalizer(self.mean, self.std, self.channels),
            "device": device,
            "augment": self.augment if augmented else None,
            **order,
        }
