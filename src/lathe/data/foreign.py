"""A plain LightningDataModule: its DataLoaders are made anew so that the number of devices does not change the
experiment.

A DataLoader's `batch_size` is the global batch. Training follows an order that is a function of (seed, epoch), as with
Lathe's own data, and the dataset's random draws (`random`, `numpy.random`, `torch`) are a function of (seed, epoch,
sample). Evaluation sees every sample once, without filling rows, which a user's own task could not tell from samples.
"""

import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from lathe.data.base import ExactDataModule, replicas_of
from lathe.data.order import EpochLoader
from lathe.data.random import hashed_seed
from lathe.errors import UserError

HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")


def share(datamodule: Any, seed: int) -> None:
    """Makes the hooks of a plain data module return exact loaders, in place; Lathe's own have them. `test_split` then
    names the split that is tested, and `eval_loader(split, device)` gives a split's batches, as `ExactDataModule` has
    them."""
    if isinstance(datamodule, ExactDataModule):
        return
    hooks = {name: getattr(datamodule, name) for name in HOOKS if is_overridden(name, datamodule, LightningDataModule)}
    made: dict[str, Any] = {}

    def train() -> Any:
        trainer = datamodule.trainer
        again = trainer is not None and trainer.reload_dataloaders_every_n_epochs > 0
        if "train" not in made or again:
            made["train"] = _train_loader(hooks["train_dataloader"](), datamodule, seed)
            if again and isinstance(made["train"], SharedLoader):
                made["train"].load_state_dict({"epoch": trainer.current_epoch, "batch": 0})
        return made["train"]

    def evaluated(split: str) -> Any:
        name = f"{split}_dataloader"
        if name not in hooks:
            raise UserError(f"split={split}: {type(datamodule).__name__} has no {name}.")
        found = hooks[name]()
        if isinstance(found, (list, tuple)):
            return [_eval_loader(loader, datamodule, name) for loader in found]
        return _eval_loader(found, datamodule, name)

    calls: dict[str, Any] = {name: functools.partial(evaluated, name.removesuffix("_dataloader")) for name in HOOKS}
    calls |= {"train_dataloader": train, "test_dataloader": lambda: evaluated(datamodule.test_split)}
    for name, hook in hooks.items():
        setattr(datamodule, name, functools.wraps(hook)(calls[name]))
    datamodule.test_split = "test"
    datamodule.eval_loader = lambda split, device=None: OnDevice(evaluated(split), device)


class OnDevice:
    """A loader's batches on a device; None leaves them where they are."""

    def __init__(self, loader: Any, device: torch.device | None) -> None:
        self.loader, self.device = loader, device

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return (batch if self.device is None else move_data_to_device(batch, self.device) for batch in self.loader)


def _reason(loader: Any) -> str | None:
    """Why a loader can't be shared out, or None."""
    if not isinstance(loader, DataLoader):
        return f"it is a {type(loader).__name__}: return one torch DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return f"its {type(loader.dataset).__name__} is an IterableDataset: use one with __getitem__ and __len__"
    if isinstance(loader.sampler, DistributedSampler):
        return (
            "it has a DistributedSampler, which counts padded samples twice: leave it out, Lathe shares the global "
            "batch out"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        return "its batches are made by the user's own code: give it a batch_size"
    sampler = loader.sampler
    if type(sampler) not in (RandomSampler, SequentialSampler):
        return f"its order is that of a {type(sampler).__name__}: use shuffle=True or False"
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(loader.dataset)):  # type: ignore[arg-type]
        return "its RandomSampler draws another number of samples than there are, or some twice: use shuffle=True"
    return None


def _train_loader(loader: Any, datamodule: Any, seed: int) -> Any:
    replicas, rank = replicas_of(datamodule.trainer)
    reason = _reason(loader)
    if reason is None:
        overfit = getattr(datamodule.trainer, "overfit_batches", 0)
        limit = None if datamodule.trainer is None else datamodule.trainer.limit_train_batches
        shuffle = isinstance(loader.sampler, RandomSampler) and not overfit
        return SharedLoader(loader, shuffle=shuffle, seed=seed, rank=rank, world_size=replicas, limit=limit)
    if replicas > 1:
        raise _refused("train_dataloader", replicas, reason)
    if not hasattr(loader, "state_dict"):
        rank_zero_warn(
            f"data: train_dataloader stays as it is, because {reason}; a run that is continued in the middle of an "
            "epoch starts that epoch's data again, so continue from the end of an epoch."
        )
    return loader


def _eval_loader(loader: Any, datamodule: Any, name: str) -> Any:
    """A rank's part of the samples, in as many batches as every other rank has; on one process the loader as it is."""
    replicas, rank = replicas_of(datamodule.trainer)
    if replicas == 1:
        return loader
    reason = _reason(loader)
    if reason is not None:
        raise _refused(name, replicas, reason)
    n, size = len(loader.dataset), loader.batch_size
    if loader.drop_last:
        n -= n % size
    most = -(-n // replicas)
    batches = -(-most // max(1, size // replicas))
    if n // replicas < batches:
        raise _refused(
            name,
            replicas,
            f"{n} samples in batches of {size} leave a replica without any: use a batch_size of at least "
            f"{2 * replicas} and as many samples",
        )
    rows = torch.arange(rank, n, replicas)
    return _with(loader, loader.dataset, [part.tolist() for part in rows.tensor_split(batches)])


def _refused(name: str, replicas: int, reason: str) -> UserError:
    return UserError(
        f"data: {name} can't be shared out exactly among {replicas} replicas, because {reason}, or trainer.devices=1."
    )


def _with(loader: DataLoader[Any], dataset: Dataset[Any], batches: Any) -> DataLoader[Any]:
    """The user's DataLoader over other lists of samples. Its own generator leaves the global one, and so the run,
    alone.
    """
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        generator=torch.Generator(),
    )


class SharedLoader(EpochLoader):
    """A rank's part of the batches of a user's DataLoader, in the order of (seed, epoch); see `EpochLoader`. An
    incomplete last batch is kept unless the user's loader drops it.

    Raises:
        UserError: a batch that does not divide by the ranks.
    """

    def __init__(
        self, loader: DataLoader[Any], *, shuffle: bool, seed: int, rank: int, world_size: int, limit: Any
    ) -> None:
        dataset: Any = loader.dataset
        n = len(dataset)
        assert loader.batch_size is not None
        size = loader.batch_size if loader.drop_last else min(loader.batch_size, n)
        rest = 0 if loader.drop_last else n % size
        for what, count in (("batch_size", size), ("last batch", rest)):
            if count % world_size:
                way = "a multiple of it" if what == "batch_size" else "drop_last=True"
                raise UserError(
                    f"data: train_dataloader's {what} of {count} samples does not divide by the {world_size} replicas "
                    f"that share it: use {way}, or trainer.devices=1."
                )
        if n == 0 or size > n:
            raise UserError(f"data: train_dataloader has {n} samples, which fill no batch of {size}.")
        super().__init__(
            n, batch_size=size, seed=seed, rank=rank, world_size=world_size, train=True, shuffle=shuffle, limit=limit
        )
        self.rest = rest // world_size
        if rest:
            self._length += 1
            allowed = int(self._length * limit) if isinstance(limit, float) else limit
            self.limit = self._length if allowed is None else min(allowed, self._length)
        self._lists: list[list[Any]] = []
        self._exact = _plain(dataset)
        self._reader = _with(loader, dataset if self._exact else Seeded(dataset, seed), _Upcoming(self))

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        order = self.epoch_order(epoch)
        whole = (self.n // self.global_batch_size) * self.global_batch_size
        mine = order[:whole].view(-1, self.global_batch_size)[:, self.rank * self.local_batch_size :][
            :, : self.local_batch_size
        ]
        lists: list[list[Any]] = mine.tolist()
        if self.rest:
            lists.append(order[whole + self.rank * self.rest :][: self.rest].tolist())
        self._lists = [part if self._exact else [(epoch, row) for row in part] for part in lists[first:]]
        yield from self._reader


class _Upcoming:
    """Batch sampler of one DataLoader for all epochs: its loader says which lists come next."""

    def __init__(self, loader: SharedLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.loader._lists)

    def __len__(self) -> int:
        return len(self.loader._lists)


def _plain(dataset: Any) -> bool:
    """Whether a dataset draws nothing: tensors, or some of their rows."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return type(dataset) is TensorDataset


class Seeded(Dataset[Any]):
    """A dataset that is asked for (epoch, sample), and whose draws from the global generators follow from these and the
    seed. The generators are left as they were."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, row = place
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        word = hashed_seed(self.seed, f"sample {row}", epoch)
        random.seed(word)
        np.random.seed(word % 2**32)
        torch.default_generator.manual_seed(word)
        try:
            return self.dataset[row]
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])
