"""A plain LightningDataModule obeys laws 2 and 3. Batches are equal on any devices, samples count once, resume is
exact.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.interruptions import Interruption, interruption, same, train_through
from support.own_parts import Noisy, Table
from support.runs import SMALL, new_run
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, get_worker_info

from lathe.data.external import SharedLoader, share
from lathe.errors import UserError
from lathe.training.train import train

__all__ = ["interruption"]  # a fixture

OWN = (
    *SMALL[1:],
    "model=mlp",
    "model.net.width=4",
    "model.net.channels=1",
    "model.net.image_size=4",
    "model.net.num_classes=2",
    "trainer.log_every_n_steps=1",
    "callbacks.throughput=null",
)


def shared(replicas: int, rank: int, module: Any = None, **options: Any) -> Any:
    """Return a data module for rank `rank` of `replicas`."""
    module = module or Table(**options)
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": replicas, "rank": rank})
    module.trainer = SimpleNamespace(
        strategy=strategy,
        limit_train_batches=1.0,
        overfit_batches=0,
        reload_dataloaders_every_n_epochs=0,
        current_epoch=0,
    )
    share(module, seed=3)
    return module


def epochs(loader: Any, count: int = 2) -> list[list[torch.Tensor]]:
    return [[x for x, _ in loader] for _ in range(count)]


@pytest.mark.parametrize("kind", ["table", "noisy"])
def test_global_batches_are_the_same_on_any_number_of_devices(kind: str) -> None:
    one = epochs(shared(1, 0, kind=kind).train_dataloader())
    assert [len(x) for x in one[0]] == [16] * 5 + [8]
    parts = [epochs(shared(4, rank, kind=kind).train_dataloader()) for rank in range(4)]
    for epoch in range(2):
        for number, whole in enumerate(one[epoch]):
            assert torch.equal(torch.cat([part[epoch][number] for part in parts]), whole)
    assert not torch.equal(one[0][0], one[1][0])
    if kind == "table":
        assert len(torch.cat(one[0]).unique(dim=0)) == 88


def test_the_stored_order_and_the_dropped_batch_are_kept() -> None:
    module = shared(2, 0, shuffle=False, drop_last=True, n=35)
    (batches,) = epochs(module.train_dataloader(), 1)
    data = Table(n=35).data.tensors[0]
    assert [len(x) for x in batches] == [8, 8]
    assert torch.equal(torch.cat(batches), torch.cat((data[:8], data[16:24])))


@pytest.mark.parametrize("n", [7, 20, 21, 88])
@pytest.mark.parametrize("replicas", [2, 3])
def test_evaluation_sees_every_sample_once_in_as_many_batches_on_each_rank(n: int, replicas: int) -> None:
    parts = [[x for x, _ in shared(replicas, rank, n=n).val_dataloader()] for rank in range(replicas)]
    assert len({len(part) for part in parts}) == 1
    seen = [x for part in parts for x in part]
    assert all(0 < len(x) <= -(-10 // replicas) for x in seen)
    assert len(torch.cat(seen)) == len(torch.cat(seen).unique(dim=0)) == n


def test_on_one_process_evaluation_is_the_users_own_loader() -> None:
    module = Table()
    loader = DataLoader(module.data, 10)
    module.val_dataloader = lambda: loader  # type: ignore[method-assign]
    assert shared(1, 0, module).val_dataloader() is loader


class Odd(Table):
    """Loaders that can't be divided over ranks."""

    def train_dataloader(self) -> Any:
        if self.kind == "distributed":
            return DataLoader(self.data, 8, sampler=DistributedSampler(self.data, 2, 0))
        return DataLoader(self.data, batch_size=None) if self.kind == "none" else super().train_dataloader()

    val_dataloader = train_dataloader


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("endless", "is an IterableDataset"),
        ("weighted", "WeightedRandomSampler"),
        ("none", "batches are made by the user's own code"),
        ("distributed", "counts padded samples twice"),
    ],
)
def test_what_cant_be_exact_is_refused_on_several_devices_only(kind: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"{words}.*trainer\.devices=1"):
        shared(2, 0, Odd(kind=kind)).train_dataloader()
    with pytest.warns(UserWarning, match="train_dataloader stays as it is"):
        assert not isinstance(shared(1, 0, Odd(kind=kind)).train_dataloader(), SharedLoader)


def test_loaders_in_turn_are_refused() -> None:
    """Lightning trains on no batch of them."""
    with pytest.raises(UserError, match="CombinedLoader with mode=sequential"):
        shared(1, 0, Table(kind="sequential")).train_dataloader()


@pytest.mark.parametrize(
    ("options", "words"),
    [({"size": 15}, "batch_size=15 is the global batch and"), ({"n": 35}, "last batch of 3 samples")],
)
def test_batches_that_do_not_divide_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"{words} does not divide by the 2 replicas"):
        shared(2, 0, Table(**options)).train_dataloader()
    assert isinstance(shared(1, 0, Table(**options)).train_dataloader(), SharedLoader)


def note_dataset(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.shift = 1000


class Shifted(Noisy):
    shift = 0

    def __getitem__(self, row: int) -> Any:
        x, y = super().__getitem__(row)
        info: Any = get_worker_info()
        return x + self.shift, y + 10 * (info.dataset is self)


def test_workers_see_the_users_dataset() -> None:
    module = Table(num_workers=1, worker_init_fn=note_dataset, in_order=False)
    module.data = Shifted(*module.held_out.tensors)
    loader = shared(1, 0, module).train_dataloader()
    assert all(bool((x > 900).all() and (y >= 10).all()) for x, y in loader)
    assert loader._reader.in_order is False


def test_a_module_finds_what_the_users_loader_has() -> None:
    module = Table(drop_last=True)
    loader = shared(1, 0, module).train_dataloader()
    assert (loader.dataset, len(loader.dataset)) == (module.data, 88)
    assert (loader.batch_size, loader.num_workers, loader.drop_last, loader.pin_memory) == (16, 0, True, False)
    assert isinstance(loader.sampler, RandomSampler)
    assert not hasattr(loader, "nothing")


# complete runs


def plain(folder: Path, kind: str = "noisy", *words: str) -> dict[str, Any]:
    cfg = new_run(folder, *OWN, *words)
    cfg["data"] = {"_target_": "support.own_parts.Table", "kind": kind}
    cfg["optimizer"]["batch_size"] = None  # the value it resolves to for data that declare none
    return cfg


def test_an_interruption_in_an_epoch_changes_nothing(tmp_path: Path, interruption: Interruption) -> None:
    words = ("noisy", "callbacks.checkpoint.every_n_train_steps=1")
    whole, cut = plain(tmp_path / "whole", *words), plain(tmp_path / "cut", *words)
    train(whole)
    resumed = train_through(cut, [("on_train_batch_start", 8)], interruption)
    assert not interruption.hook  # it was interrupted
    same(resumed, Path(whole["paths"]["run_dir"]))
