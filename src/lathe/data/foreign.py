"""Rebuilds a user's DataLoaders so that results do not depend on the number of devices.

A DataLoader's `batch_size` is the global batch. The training order depends on (seed, epoch), and the dataset's draws
(`random`, `numpy.random`, `torch`) on (seed, epoch, sample). Evaluation sees every sample once, without padding rows,
which a user's task could not recognize.
"""

import functools
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lathe.data.base import ExactDataModule, replicas_of
from lathe.data.shared import SharedLoader, parts_in_order, reader_over
from lathe.data.transfer import Transferred, eval_stage, go_ahead
from lathe.errors import UserError, require

HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
READS = ("__iter__", "__len__", "_get_iterator")  # a DataLoader that overrides one of them is left unchanged


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
    made: dict[str, Any] = {}

    def train() -> Any:
        trainer = datamodule.trainer
        again = trainer is not None and trainer.reload_dataloaders_every_n_epochs > 0
        if "train" not in made or again:
            made["train"] = _train_loader(hooks["train_dataloader"](), datamodule, seed, own)
            go_ahead(made["train"], trainer)
            if again and isinstance(made["train"], SharedLoader):
                made["train"].load_state_dict({"epoch": trainer.current_epoch, "batch": 0})
        return made["train"]

    def evaluated(split: str) -> Any:
        name = f"{split}_dataloader"
        require(name in hooks, f"split={split}: {type(datamodule).__name__} has no {name}.")
        found = hooks[name]()
        if own:
            return found
        if isinstance(found, (list, tuple)):
            return [_eval_loader(loader, datamodule, name) for loader in found]
        return _eval_loader(found, datamodule, name)

    calls: dict[str, Any] = {name: functools.partial(evaluated, name.removesuffix("_dataloader")) for name in HOOKS}
    calls |= {"train_dataloader": train, "test_dataloader": lambda: evaluated(datamodule.test_split)}
    for name, hook in hooks.items():
        setattr(datamodule, name, functools.wraps(hook)(calls[name]))
    datamodule.test_split = "test"
    kind = type(datamodule)  # Lightning's __str__ reads the loaders, needs DataLoaders, and is looked up on the class
    names = {"__str__": object.__repr__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    datamodule.__class__ = type(kind.__name__, (kind,), names)
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


def _train_loader(loader: Any, datamodule: Any, seed: int, own: bool) -> Any:
    replicas, rank = replicas_of(datamodule.trainer)
    require(
        not isinstance(loader, CombinedLoader) or loader._mode != "sequential",
        "data: train_dataloader returns a CombinedLoader with mode=sequential, which Lightning trains on no batch of. "
        "Use max_size_cycle, max_size or min_size.",
    )
    reason = "trainer.use_distributed_sampler=true" if own else _reason(loader)
    if own and replicas > 1:
        rank_zero_warn(
            f"{reason}: each of the {replicas} ranks keeps its own loader, as in plain Lightning. Batches and results "
            "depend on the number of devices, and evaluation may count samples twice."
        )
    if reason is None:
        require(len(loader.dataset) > 0, "data: the dataset of train_dataloader is empty. Check where it reads from.")
        _check_divided(loader, datamodule, replicas)
        overfit = getattr(datamodule.trainer, "overfit_batches", 0)
        limit = None if datamodule.trainer is None else datamodule.trainer.limit_train_batches
        shuffle = isinstance(loader.sampler, RandomSampler) and not overfit
        return SharedLoader(loader, shuffle=shuffle, seed=seed, rank=rank, world_size=replicas, limit=limit)
    if replicas > 1 and not own:
        raise _refused("train_dataloader", replicas, reason)
    if not hasattr(loader, "state_dict"):
        rank_zero_warn(
            f"data: train_dataloader stays as it is, because {reason}; a run that is continued in the middle of an "
            "epoch starts that epoch's data again, so continue from the end of an epoch."
        )
    return loader


def _check_divided(loader: Any, datamodule: Any, replicas: int) -> None:
    """Raise UserError if a data module has divided its batch_size by the number of devices itself."""
    said = getattr(datamodule, "batch_size", getattr(datamodule.hparams, "batch_size", None))
    require(
        replicas == 1 or said != loader.batch_size * replicas,
        f"data: {type(datamodule).__name__} has batch_size={said} and a train_dataloader of {loader.batch_size}: the "
        f"DataLoader's batch_size is the global batch, which Lathe divides among the {replicas} replicas itself, so "
        "give it all of batch_size.",
    )


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
