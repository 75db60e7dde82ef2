"""Base of the exact data modules: splits, loaders, and the samples of each process."""

from abc import abstractmethod
from contextlib import suppress
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch
from lightning.pytorch import LightningDataModule

from lathe.data.checks import using
from lathe.data.order import EpochLoader, Selection
from lathe.data.splits import SPLITS
from lathe.data.transfer import Transferred, eval_stage, go_ahead
from lathe.errors import require

SplitData = TypeVar("SplitData")


class ExactDataModule(LightningDataModule, Generic[SplitData]):
    """Train, validation and test loaders that are `EpochLoader`s, equal on any number of devices.

    A subclass opens its data (`open`) and builds a loader for a split (`build`).

    Args:
        batch_size: training samples per step, over all devices together.
        eval_batch_size: the same for validation and test; None for `batch_size`.
        seed: of the order.
    """

    def __init__(self, batch_size: int, eval_batch_size: int | None = None, seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.seed = seed
        self.source: Any = None  # with `prepare` and `load`
        self.test_split = "test"
        self.selection: Selection | None = None  # the training samples of an epoch; None for all
        self.fills_up = True  # whether evaluation batches are padded; see EpochLoader
        self._splits: dict[str, SplitData] | None = None
        self._train_loader: EpochLoader | None = None
        self._loaders: WeakSet[Any] = WeakSet()

    def __str__(self) -> str:
        """Return its name and the sizes of open splits; Lightning's own would read every batch."""
        sizes = [f"{name}: {size}" for name, size in self.sizes.items()]
        return f"{type(self).__name__}({', '.join(sizes) or 'not set up'})"

    @property
    def selects(self) -> bool:
        """Return whether its training loader accepts a `selection`."""
        return False

    @abstractmethod
    def open(self) -> dict[str, SplitData]:
        """Open "train", "val" and "test", and check the declared facts; called once in each process."""

    @abstractmethod
    def build(self, split: SplitData, device: torch.device, **order: Any) -> EpochLoader:
        """Return a loader of a split; `order` are the settings of `EpochLoader`."""

    def prepare_data(self) -> None:
        """Let the source, if there is one, download or check its data; called in one process per machine."""
        if hasattr(self.source, "prepare"):
            with using(self.source, "prepared"):
                self.source.prepare()

    @property
    def opened(self) -> dict[str, SplitData]:
        """Return the splits, opened."""
        if self._splits is None:
            self.setup()
        assert self._splits is not None
        return self._splits

    def setup(self, stage: str | None = None) -> None:
        """Open the data once; a new fit starts at epoch 0."""
        if stage in ("fit", None):
            self._train_loader = self.selection = None
        if self._splits is None:
            self._splits = self.open()

    @property
    def sizes(self) -> dict[str, int]:
        """Return the number of samples of each open split that has a length."""
        lengths = {}
        for name, split in (self._splits or {}).items():
            with suppress(TypeError):  # a stream
                lengths[name] = len(split)  # type: ignore[arg-type]
        return lengths

    def state_dict(self) -> dict[str, Any]:
        """Return `sizes` and the seed: a resume detects changed data and other runs' checkpoints by them."""
        return {"sizes": self.sizes, "seed": self.seed} if self.sizes else {}

    def teardown(self, stage: str) -> None:
        """End persistent workers, which otherwise live as long as this process."""
        for loader in self._loaders:
            loader.close()

    def train_dataloader(self) -> EpochLoader:
        """Return one loader for a whole fit: its epochs continue when Lightning asks for it again."""
        if self._train_loader is None:
            selection: dict[str, Any] = {} if self.selection is None else {"selection": self.selection}
            self._train_loader = self._loader(
                "train",
                batch_size=self.batch_size,
                train=True,
                shuffle=getattr(self.trainer, "overfit_batches", 0) == 0,  # overfitting repeats the same few samples
                limit=None if self.trainer is None else self.trainer.limit_train_batches,
                **selection,
            )
        return self._train_loader

    def val_dataloader(self) -> EpochLoader:
        """Return validation data in order."""
        return self._eval_loader("val")

    def test_dataloader(self) -> EpochLoader:
        """Return test data in order, or the split that `test_split` names."""
        return self._eval_loader(self.test_split)

    def eval_loader(self, split: str, device: torch.device | None = None) -> Transferred:
        """Return a split in stored order after the transfer hooks; `device` None is the trainer's, or the CPU."""
        return Transferred(self._eval_loader(split, device), self, eval_stage(split), device)

    def _eval_loader(self, split: str, device: torch.device | None = None) -> EpochLoader:
        return self._loader(split, device, batch_size=self.eval_batch_size, train=False)

    def name_of(self, split: str, number: int) -> str | None:
        """Return the display name of sample `number` of a split, such as its file; None if it has none."""
        return None if self._splits is None else getattr(self._splits[split], "name", lambda _: None)(number)

    def _loader(self, name: str, device: torch.device | None = None, **order: Any) -> EpochLoader:
        require(name in SPLITS, f"split={name} is unknown: choose one of {', '.join(SPLITS)}.")
        split = self.opened[name]
        replicas, rank = replicas_of(self.trainer)
        where = device or (torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device)
        loader = self.build(split, where, seed=self.seed, rank=rank, world_size=replicas, **order)
        loader.fills_up = self.fills_up
        if not hasattr(loader, "dataset"):
            vars(loader)["dataset"] = split  # modules read its length
        if hasattr(loader, "close"):  # a user's own loader may lack it
            self._loaders.add(loader)
        go_ahead(loader, self.trainer, where)
        return loader


def replicas_of(trainer: Any) -> tuple[int, int]:
    """Return the number of replicas with different data, and the index of this process's replica."""
    if trainer is None:
        return 1, 0
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    if kwargs is not None:
        return kwargs["num_replicas"], kwargs["rank"]
    return trainer.world_size, trainer.global_rank
