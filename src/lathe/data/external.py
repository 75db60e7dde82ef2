"""Loaders over a user's datasets and DataLoaders whose results do not depend on the number of devices.

A DataLoader's `batch_size` is the global batch. The training order depends on (seed, epoch), and the dataset's draws
(`random`, `numpy.random`, `torch`) on (seed, epoch, sample). Evaluation sees every sample once, without padding rows,
which a user's task could not recognize.
"""

import copy
import functools
import hashlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    get_worker_info,
)

from lathe.data.base import ExactDataModule, replicas_of
from lathe.data.order import EpochLoader, Reader
from lathe.data.random import Rowed, Rows, Seeded, Wrapper, draws_nothing, hashed_seed, put_back, seed_all
from lathe.data.splits import Labels
from lathe.data.transfer import SideStream, Transferred, eval_stage, go_ahead, one_ahead
from lathe.errors import UserError, require

HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
READS = ("__iter__", "__len__", "_get_iterator")  # a DataLoader that overrides one of them is left unchanged


def is_iterable(dataset: Any) -> bool:
    """Return whether a dataset has its own order, as torch's and Hugging Face's iterable ones do."""
    return isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and hasattr(dataset, "set_epoch"))


def reader_over(loader: DataLoader[Any], batches: Any, seed: int | None = None) -> Reader:
    """Return the user's DataLoader over other batches, with its own generator instead of the global one.

    With a `seed`, batches are `Rows`, and the dataset's draws follow from (seed, epoch, sample).
    """
    dataset: Any = loader.dataset
    if seed is not None and not draws_nothing(dataset):
        dataset = Seeded(dataset, seed, collate_draws=not _collate_draws_nothing(loader))
    return Reader(
        dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        pin_memory_device=loader.pin_memory_device,
        timeout=loader.timeout,
        worker_init_fn=functools.partial(_begin_worker, loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        in_order=loader.in_order,
        generator=torch.Generator(),
    )


def _begin_worker(init: Callable[[int], Any] | None, number: int) -> None:
    """Call the user's `worker_init_fn` with the user's dataset, without wrappers, in the worker's info."""
    info: Any = get_worker_info()
    while isinstance(info.dataset, Wrapper):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
    if init is not None:
        init(number)


def _collate_draws_nothing(loader: DataLoader[Any]) -> bool:
    return loader.collate_fn is default_collate or draws_nothing(loader.collate_fn)


def parts_in_order(n: int, size: int, rank: int, replicas: int) -> list[list[int]]:
    """Return a rank's evaluation samples, in as many batches as on other ranks; each sample is used once.

    Raises:
        ValueError: a rank would have an empty batch.
    """
    most = -(-n // replicas)
    batches = -(-most // max(1, size // replicas))
    if n // replicas < batches:
        raise ValueError(
            f"{n} samples in batches of {size} leave a replica without any: use a batch_size of at least "
            f"{2 * replicas} and as many samples"
        )
    return [part.tolist() for part in torch.arange(rank, n, replicas).tensor_split(batches)]


class SharedLoader(EpochLoader):
    """A rank's part of a user's DataLoader, in the order of (seed, epoch); see `EpochLoader`.

    An incomplete last batch is kept unless the user's loader drops it. `labels` int64 [n] are the class numbers of the
    samples, if known.
    """

    even = False  # the user's collate_fn may drop samples, and labels of -100 do not count

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        world_size: int = 1,
        limit: Any = None,
        labels: Labels | None = None,
        **order: Any,
    ) -> None:
        self.loader, self.labels = loader, labels
        n, size = len(loader.dataset), loader.batch_size or 1  # type: ignore[arg-type]
        size = size if loader.drop_last else min(size, n)
        rest = 0 if loader.drop_last else n % size
        super().__init__(n, batch_size=size, world_size=world_size, train=True, limit=limit, **order)
        if rest % world_size:
            raise UserError(
                f"data: train_dataloader's last batch of {rest} samples does not divide by the {world_size} replicas "
                "that share it: use drop_last=True, or trainer.devices=1."
            )
        self.rest = rest // world_size
        if rest:
            self._length += 1
            self.limit = self.limited(limit)
        self.goes_ahead = loader.num_workers > 0 or _collate_draws_nothing(loader)
        self._upcoming: list[Rows] = []  # the samples of the batches to read
        self._reader = reader_over(loader, self._upcoming, self.seed)

    def __getattr__(self, name: str) -> Any:
        """Return other attributes, such as `dataset` and `batch_size`, from the user's DataLoader."""
        if name == "loader":  # in a copy, which has no attributes yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        self._upcoming[:] = [Rows(part, epoch) for part in self._parts(epoch)[first:]]
        yield from self._reader

    def numbers(self, batch: int) -> list[int]:
        """Return this rank's samples of a batch in the current epoch."""
        return self._parts(self._epoch)[batch]

    def _parts(self, epoch: int) -> list[list[int]]:
        """Return this rank's samples of each batch."""
        order, start = self.epoch_order(epoch), self.rank * self.local_batch_size
        whole = self.n - self.n % self.global_batch_size
        mine = order[:whole].view(-1, self.global_batch_size)[:, start : start + self.local_batch_size]
        lists: list[list[int]] = mine.tolist()
        if self.rest:
            lists.append(order[whole + self.rank * self.rest :][: self.rest].tolist())
        return lists

    def close(self) -> None:
        self._reader.close()


class InOrder:
    """A rank's evaluation batches: every sample once, no padding; draws by `seed`, equal in all epochs."""

    def __init__(self, loader: DataLoader[Any], seed: int, rank: int, world_size: int) -> None:
        try:
            self.rows = parts_in_order(len(loader.dataset), loader.batch_size or 1, rank, world_size)  # type: ignore[arg-type]
        except ValueError as error:
            raise UserError(f"data.eval_batch_size={loader.batch_size}: {error}, or trainer.devices=1.") from error
        self.limit = len(self.rows)
        self.goes_ahead = loader.num_workers > 0 or _collate_draws_nothing(loader)
        self.side: SideStream | None = None  # where batches are prefetched
        self._reader = reader_over(loader, [Rows(part, 0) for part in self.rows], seed)

    def __len__(self) -> int:
        return len(self.rows)

    def numbers(self, batch: int) -> list[int]:
        """Return this rank's samples of a batch."""
        return list(self.rows[batch])

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._reader)
        return batches if self.side is None else one_ahead(batches, self.side)

    def close(self) -> None:
        self._reader.close()


class EvalStream:
    """Evaluation batches of an iterable dataset: every sample once.

    Every process reads the whole dataset in its own order, draws by (seed, epoch, number of the sample), and keeps each
    `world_size`-th sample of a global batch. A last batch with fewer samples than processes joins the one before it.

    `items` are `Items` of `lathe.data.dataset`, `collate` makes a batch of `Rowed` samples, `size` is of global ones.
    """

    def __init__(
        self, items: Any, collate: Callable[[Rowed], Any], size: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        self.items, self.collate, self.size, self.seed = items, collate, size, seed
        self.rank, self.world_size = rank, world_size
        self.name = f"{items.key}: {type(items.dataset).__name__}"
        self.once = hasattr(items.dataset, "__next__") and not hasattr(items.dataset, "load_state_dict")
        require(
            not self.once or world_size == 1,
            f"{self.name} is its own iterator, which a continued run cannot read again: return a new one from __iter__,"
            " or use trainer.devices=1.",
        )

    def __iter__(self) -> Iterator[Any]:
        pending: Rowed | None = None
        for count, samples in self.read():
            if pending is not None and count < self.world_size:
                samples = Rowed([*pending, *samples], [*pending.rows, *samples.rows])
            elif pending is not None:
                yield self.collate(pending)
            else:
                require(
                    count >= self.world_size,
                    f"{self.items.key}: a batch of {count} leaves one of {self.world_size} replicas without samples: "
                    "give more samples, a larger data.eval_batch_size, or fewer devices.",
                )
            pending = samples
        if pending is not None:
            yield self.collate(pending)

    def read(self, epoch: int = 0, first: int = 0, start: int = 0) -> Iterator[tuple[int, Rowed]]:
        """Yield the size of each global batch from batch `first` on, and this process's samples of it.

        `start` is the number of the dataset's next sample. Samples before batch `first` are read and left out.
        """
        with put_back():
            seed_all(hashed_seed(self.seed, "stream", epoch))
            samples = iter(self.items.dataset)
        first_number = start
        while True:
            count, rows, local = 0, list[int](), list[Any]()
            with put_back():
                for number in range(start, start + self.size):
                    seed_all(hashed_seed(self.seed, f"sample {number}", epoch))
                    try:
                        sample = next(samples)
                    except StopIteration:
                        break
                    count += 1
                    if number == first_number:
                        self._check_same_on_ranks(sample)
                    if start >= first * self.size and number % self.world_size == self.rank:
                        local.append(self.items.made(sample, number))
                        rows.append(number)
            if not count:
                return
            if start >= first * self.size:
                yield count, Rowed(local, rows)
            start += count

    def _check_same_on_ranks(self, sample: Any) -> None:
        """Raise UserError if the ranks read different samples, as those of a dataset that divides itself."""
        if self.world_size == 1 or not dist.is_initialized():
            return
        # a pickled tensor has addresses in it
        leaves = [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(sample)]
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, hashlib.sha256(pickle.dumps(leaves)).hexdigest())
        require(
            len(set(digests)) == 1,
            f"{self.name} gives each process other samples: let it give all samples in the same order to every "
            "process, among which Lathe divides them.",
        )


class TrainStream(EpochLoader):
    """Training batches of an iterable dataset, divided as in `EvalStream`; an epoch has `samples` samples.

    Each epoch restarts the dataset, after its `set_epoch(epoch)` if it has one. A resume within an epoch loads the
    dataset's state if it has `state_dict` and `load_state_dict`, else it reads the epoch's samples again up to its
    place.
    """

    def __init__(self, items: Any, collate: Callable[[Rowed], Any], samples: int, **order: Any) -> None:
        super().__init__(samples, train=True, **{**order, "shuffle": False})
        self._stream = EvalStream(items, collate, self.global_batch_size, self.seed, self.rank, self.world_size)
        self._source, self._kept = items.dataset, None
        self._stateful = hasattr(self._source, "state_dict") and hasattr(self._source, "load_state_dict")
        if self._stream.once:
            rank_zero_warn(
                f"{self._stream.name} is its own iterator, which a continued run cannot read again, so continue from "
                "the end of an epoch, or return a new iterator from __iter__."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `EpochLoader`, and that of the dataset if it has one."""
        state = {"dataset": copy.deepcopy(self._source.state_dict())} if self._stateful and self._batch else {}
        return {**super().state_dict(), **state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._kept = state_dict.get("dataset")

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        state, self._kept = self._kept, None
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)
        placed = first > 0 and state is not None
        if placed:
            self._source.load_state_dict(state)
        batches = self._stream.read(epoch, first, first * self.global_batch_size if placed else 0)
        for number in range(first, len(self)):
            count, samples = next(batches, (0, None))
            require(
                count == self.global_batch_size,
                f"{self._stream.name} ended within batch {number + 1} of an epoch, expected {self.n} samples: set "
                "data.samples to as many as it gives.",
            )
            yield self._stream.collate(samples)  # type: ignore[arg-type]


class ModuleDataModule(LightningDataModule):
    """The loaders that the LightningModule itself defines: data=module.

    For a loader that is made of the net, such as episodes in reinforcement learning. A hook that the module does not
    define gives no batches.
    """

    def train_dataloader(self) -> Any:
        return self._loader("train_dataloader")

    def val_dataloader(self) -> Any:
        return self._loader("val_dataloader")

    def test_dataloader(self) -> Any:
        return self._loader("test_dataloader")

    def predict_dataloader(self) -> Any:
        return self._loader("predict_dataloader")

    def _loader(self, hook: str) -> Any:
        assert self.trainer is not None
        module = self.trainer.lightning_module
        return getattr(module, hook)() if is_overridden(hook, module) else []


def share(datamodule: Any, seed: int, own: bool = False) -> None:
    """Make a plain data module's hooks return exact loaders, unless `own`; add `test_split` and `eval_loader`."""
    if isinstance(datamodule, ExactDataModule):
        return
    hooks = {name: getattr(datamodule, name) for name in HOOKS if is_overridden(name, datamodule, LightningDataModule)}
    cache: dict[str, Any] = {}

    def train() -> Any:
        trainer = datamodule.trainer
        reloads = trainer is not None and trainer.reload_dataloaders_every_n_epochs > 0
        if "train" not in cache or reloads:
            cache["train"] = _train_loader(hooks["train_dataloader"](), datamodule, seed, own)
            go_ahead(cache["train"], trainer)
            if reloads and isinstance(cache["train"], SharedLoader):
                cache["train"].load_state_dict({"epoch": trainer.current_epoch, "batch": 0})
        return cache["train"]

    def evaluated(split: str) -> Any:
        name = f"{split}_dataloader"
        require(name in hooks, f"split={split}: {type(datamodule).__name__} has no {name}.")
        loaders = hooks[name]()
        if own:
            return loaders
        if isinstance(loaders, (list, tuple)):
            return [_eval_loader(loader, datamodule, name) for loader in loaders]
        return _eval_loader(loaders, datamodule, name)

    calls: dict[str, Any] = {name: functools.partial(evaluated, name.removesuffix("_dataloader")) for name in HOOKS}
    calls |= {"train_dataloader": train, "test_dataloader": lambda: evaluated(datamodule.test_split)}
    for name, hook in hooks.items():
        setattr(datamodule, name, functools.wraps(hook)(calls[name]))
    datamodule.test_split = "test"
    kind = type(datamodule)  # Lightning's __str__ reads the loaders, needs DataLoaders, and is looked up on the class
    names = {"__str__": object.__repr__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    datamodule.__class__ = type(kind.__name__, (kind,), names)  # Python looks __str__ up on the class only
    datamodule.eval_loader = lambda split, device=None: Transferred(
        evaluated(split), datamodule, eval_stage(split), device
    )


def _reason(loader: Any) -> str | None:
    """Return the reason why a loader can't be sharded, or None."""
    if not isinstance(loader, DataLoader):
        return f"it is a {type(loader).__name__}: return one torch DataLoader"
    own = [name for name in READS if getattr(type(loader), name) is not getattr(DataLoader, name)]
    sampler = loader.sampler
    if own:
        return f"its {type(loader).__name__} overrides {own[0]}: use torch's own"
    if isinstance(loader.dataset, IterableDataset):
        return f"its {type(loader.dataset).__name__} is an IterableDataset: use data=dataset for it"
    if isinstance(sampler, DistributedSampler):
        return "it has a DistributedSampler, which counts padded samples twice: leave it out, Lathe divides the batch"
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        return "its batches are made by the user's own code: give it a batch_size"
    whole = isinstance(sampler, RandomSampler) and not sampler.replacement and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
    if type(sampler) not in (RandomSampler, SequentialSampler) or not (whole or type(sampler) is SequentialSampler):
        return f"its order is that of a {type(sampler).__name__} with its own settings: use shuffle=True or False"
    return None


def _train_loader(loader: Any, datamodule: Any, seed: int, keeps_own: bool) -> Any:
    replicas, rank = replicas_of(datamodule.trainer)
    require(
        not isinstance(loader, CombinedLoader) or loader._mode != "sequential",
        "data: train_dataloader returns a CombinedLoader with mode=sequential, which Lightning trains on no batch of. "
        "Use max_size_cycle, max_size or min_size.",
    )
    reason = "trainer.use_distributed_sampler=true" if keeps_own else _reason(loader)
    if keeps_own and replicas > 1:
        rank_zero_warn(
            f"{reason}: each of the {replicas} ranks keeps its own loader, as in plain Lightning. Batches and results "
            "depend on the number of devices, and evaluation may count samples twice."
        )
    if reason is None:
        require(len(loader.dataset) > 0, "data: the dataset of train_dataloader is empty. Check where it reads from.")
        batch_size = getattr(datamodule, "batch_size", getattr(datamodule.hparams, "batch_size", None))
        require(
            replicas == 1 or batch_size != loader.batch_size * replicas,
            f"data: {type(datamodule).__name__} has batch_size={batch_size} and a train_dataloader of "
            f"{loader.batch_size}: the DataLoader's batch_size is the global batch, which Lathe divides among the "
            f"{replicas} replicas itself, so give it all of batch_size.",
        )
        overfit = getattr(datamodule.trainer, "overfit_batches", 0)
        limit = None if datamodule.trainer is None else datamodule.trainer.limit_train_batches
        shuffle = isinstance(loader.sampler, RandomSampler) and not overfit
        return SharedLoader(loader, shuffle=shuffle, seed=seed, rank=rank, world_size=replicas, limit=limit)
    if replicas > 1 and not keeps_own:
        raise _refused("train_dataloader", replicas, reason)
    if not hasattr(loader, "state_dict"):
        rank_zero_warn(
            f"data: train_dataloader stays as it is, because {reason}; a run that is continued in the middle of an "
            "epoch starts that epoch's data again, so continue from the end of an epoch."
        )
    return loader


def _eval_loader(loader: Any, datamodule: Any, name: str) -> Any:
    """Return this rank's samples, in equally many batches on each rank; the same loader on one process."""
    replicas, rank = replicas_of(datamodule.trainer)
    if replicas == 1:
        return loader
    reason = _reason(loader)
    if reason is not None:
        raise _refused(name, replicas, reason)
    n, size = len(loader.dataset), loader.batch_size
    try:
        parts = parts_in_order(n - n % size if loader.drop_last else n, size, rank, replicas)
    except ValueError as error:
        raise _refused(name, replicas, str(error)) from error
    return reader_over(loader, parts)


def _refused(name: str, replicas: int, reason: str) -> UserError:
    return UserError(
        f"data: {name} can't be shared out exactly among {replicas} replicas, because {reason}, or trainer.devices=1. "
        "trainer.use_distributed_sampler=true keeps each rank's own loader."
    )
