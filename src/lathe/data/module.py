"""The LightningDataModule of every image data set."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule

from lathe.data.augment import Augment
from lathe.data.checks import check_number
from lathe.data.loader import ImageLoader, ResidentLoader
from lathe.data.normalize import Normalizer
from lathe.data.splits import Source, Split, Splits
from lathe.data.stream import StreamLoader
from lathe.errors import UserError


class ImageDataModule(LightningDataModule):
    """Train, validation and test loaders over a source of images, equal on one device and on many.

    Args:
        source: where the images come from.
        num_classes: declared, and checked against the source, so that a net can be configured before any data is touched.
        channels: likewise.
        image_size: side in pixels, likewise.
        mean: of each channel, on a scale from 0 to 1.
        std: of each channel, on the same scale.
        batch_size: training samples per step, over all devices together.
        eval_batch_size: the same for validation and test; None takes `batch_size`.
        seed: of order and augmentation; 0 is a seed.
        augment: of training images; None is none.
        normalize: "batch" or "folded", as `ResidentLoader` has it.
        loader: "resident" keeps images on the device; "workers" streams them with the DataLoader settings below.
        num_workers: reading processes of "workers".
        pin_memory: page-locked batches of "workers", on a GPU.
        prefetch_factor: batches each worker reads ahead; None is torch's choice.
        persistent_workers: keep workers between epochs.

    Raises:
        UserError: for an unknown name, a size that is none, or a wrong `mean` or `std` here; for facts that the source contradicts
            in `setup`; for batch sizes that do not fit the devices or the data when a loader is asked for.
    """

    def __init__(
        self,
        source: Source,
        num_classes: int,
        channels: int,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        batch_size: int,
        eval_batch_size: int | None = None,
        seed: int = 0,
        augment: Augment | None = None,
        normalize: Literal["batch", "folded"] = "batch",
        loader: Literal["resident", "workers"] = "resident",
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
    ) -> None:
        super().__init__()
        for key, value, known in (("normalize", normalize, ("batch", "folded")), ("loader", loader, ("resident", "workers"))):
            if value not in known:
                raise UserError(f"data.{key}={value} is unknown: choose one of {', '.join(known)}.")
        check_number("data.batch_size", batch_size, 1)
        check_number("data.num_workers", num_workers, 0)
        for key, size in (("eval_batch_size", eval_batch_size), ("prefetch_factor", prefetch_factor)):
            if size is not None:
                check_number(f"data.{key}", size, 1)
        if loader == "workers" and normalize == "folded":
            raise UserError("data.normalize=folded needs resident images: use data.normalize=batch with data.loader=workers.")
        self.source = source
        self.test_split = "test"
        self.num_classes = num_classes
        self.channels = channels
        self.image_size = image_size
        self.mean, self.std = list(mean), list(std)
        self.batch_size = batch_size
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.seed = seed
        self.augment = augment or Augment()
        self.normalize = normalize
        self.loader = loader
        self.reader: dict[str, Any] = {
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
        }
        Normalizer(self.mean, self.std, channels)  # a wrong mean or std is told now, not after a download
        self._splits: Splits | None = None
        self._train_loader: ImageLoader | None = None

    def prepare_data(self) -> None:
        """Lets the source fetch its data; Lightning calls it in one process per machine."""
        self.source.prepare()

    def setup(self, stage: str | None = None) -> None:
        """Opens the data, once, and checks the declared facts; a new fit starts again at epoch 0."""
        if stage in ("fit", None):
            self._train_loader = None
        if self._splits is not None:
            return
        splits = self.source.load()
        _, channels, height, width = splits.train.images.shape
        facts = {"num_classes": self.source.num_classes, "channels": channels, "image_size": max(height, width)}
        for name, found in facts.items():
            if getattr(self, name) != found:
                raise UserError(
                    f"data.{name}={getattr(self, name)} is not what the source {type(self.source).__name__} has:"
                    f" set data.{name}={found}, or change data.source."
                )
        self._splits = splits

    def train_dataloader(self) -> ImageLoader:
        """One loader for a whole fit: its epochs go on counting when Lightning asks for it again."""
        if self._train_loader is None:
            overfit = getattr(self.trainer, "overfit_batches", 0) > 0
            self._train_loader = self._build(
                self._split("train"),
                batch_size=self.batch_size,
                train=True,
                # overfitting means the same few images again and again
                augment=None if overfit else self.augment,
                shuffle=not overfit,
                limit=None if self.trainer is None else self.trainer.limit_train_batches,
            )
        return self._train_loader

    def val_dataloader(self) -> ImageLoader:
        """Validation data in order, unaugmented."""
        return self.eval_loader("val")

    def test_dataloader(self) -> ImageLoader:
        """Test data in order, unaugmented; another split if `test_split` names one."""
        return self.eval_loader(self.test_split)

    def eval_loader(self, split: str, device: torch.device | None = None) -> ImageLoader:
        """ "train", "val" or "test" in stored order, unaugmented, every sample once; rows that only fill up have the label -100.

        Args:
            split: which one.
            device: where batches are wanted; None is the trainer's device, or the CPU without a trainer.

        Raises:
            UserError: for another name, or a batch with fewer samples than devices.
        """
        return self._build(self._split(split), batch_size=self.eval_batch_size, train=False, augment=None, device=device)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Batches are made where they are wanted; any other is moved as Lightning would."""
        if isinstance(batch, tuple) and isinstance(batch[0], torch.Tensor) and batch[0].device == device:
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def _split(self, name: str) -> Split:
        if name not in ("train", "val", "test"):
            raise UserError(f"split={name} is unknown: choose one of train, val, test.")
        if self._splits is None:
            self.setup()
        assert self._splits is not None
        split: Split = getattr(self._splits, name)
        return split

    def _build(self, split: Split, *, device: torch.device | None = None, **settings: Any) -> ImageLoader:
        replicas, rank = self._replicas()
        common: dict[str, Any] = {
            "num_classes": self.num_classes,
            "normalizer": Normalizer(self.mean, self.std, self.channels),
            "device": device or self._device(),
            "seed": self.seed,
            "rank": rank,
            "world_size": replicas,
        } | settings
        if self.loader == "workers":
            return StreamLoader(split, **self.reader, **common)
        images, labels = split.read()
        return ResidentLoader(torch.from_numpy(images), torch.from_numpy(labels), normalize=self.normalize, **common)

    def _device(self) -> torch.device:
        if self.trainer is None:
            return torch.device("cpu")
        device: torch.device = self.trainer.strategy.root_device
        return device

    def _replicas(self) -> tuple[int, int]:
        """How many processes see different data, and which of them this is; tensor or pipeline ranks share a replica."""
        if self.trainer is None:
            return 1, 0
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None)
        if kwargs is not None:
            return kwargs["num_replicas"], kwargs["rank"]
        return self.trainer.world_size, self.trainer.global_rank
