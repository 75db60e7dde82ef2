"""data=dataset: equal batches of map-style datasets on any number of devices and after interruptions."""

import random
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.interruptions import Interruption, interruption, same, train_through
from support.own_datasets import Columns, Drawing, NoLength, Pictures, Shift, halve, load_columns, padded
from support.ranks import on_ranks
from support.runs import SMALL, column, new_run
from torch.utils.data import Subset, TensorDataset

from lathe.data import DatasetDataModule
from lathe.errors import UserError
from lathe.runs.build import make_data
from lathe.training.train import train

__all__ = ["interruption"]  # a fixture
FACTS = {"num_classes": 2, "channels": 1, "image_size": 4}


def module(train: Any, replicas: int = 1, rank: int = 0, **settings: Any) -> DatasetDataModule:
    """Return a data module for rank `rank` of `replicas`."""
    data = DatasetDataModule(train, **{"batch_size": 16, "seed": 3, **settings})  # type: ignore[arg-type]
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": replicas, "rank": rank})
    data.trainer = SimpleNamespace(strategy=strategy, limit_train_batches=1.0, overfit_batches=0)  # type: ignore[assignment]
    strategy.root_device = torch.device("cpu")
    return data


def epochs(data: DatasetDataModule, count: int = 2) -> list[list[torch.Tensor]]:
    loader = data.train_dataloader()
    return [[x for x, _ in loader] for _ in range(count)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Pictures, Drawing])
def test_global_batches_are_the_same_on_any_number_of_devices(kind: Callable, workers: int) -> None:
    options = {"num_workers": workers, "transform": Shift() if kind is Pictures else None}
    one = epochs(module(kind(), **options))
    parts = [epochs(module(kind(), 2, rank, **options)) for rank in range(2)]
    assert len(one[0]) == 80 // 16
    for epoch in range(2):
        for number, whole in enumerate(one[epoch]):
            assert torch.equal(torch.cat([part[epoch][number] for part in parts]), whole)
    assert not torch.equal(one[0][0], one[1][0])
    assert len(torch.cat(one[0]).unique(dim=0)) == 80


def test_draws_follow_the_sample_not_the_batch_and_leave_the_generators() -> None:
    before = torch.get_rng_state(), np.random.get_state()[2]
    few, many = (module(Drawing(), batch_size=size) for size in (8, 16))
    assert torch.equal(torch.cat(epochs(few, 1)[0]), torch.cat(epochs(many, 1)[0]))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[2]
    first, second = ([x for x, _ in many.val_dataloader()] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Sometimes(Pictures):
    """Draws from torch in every third sample, and only in some of those from a second generator."""

    def __getitem__(self, row: int) -> Any:
        x, y = super().__getitem__(row)
        if row % 3 == 0:
            x = x + torch.randn(())
            x = x + (random.gauss(0, 1) if row % 2 else 0.0) + (float(np.random.normal()) if row % 15 == 0 else 0.0)
        return x, y


@pytest.mark.parametrize("workers", [0, 1])
def test_a_generator_that_is_drawn_from_in_the_middle_of_a_run(workers: int) -> None:
    state = random.getstate()
    runs = [epochs(module(Sometimes(), batch_size=size, num_workers=workers)) for size in (1, 16)]
    for one, other in zip(*runs, strict=True):
        assert torch.equal(torch.cat(one), torch.cat(other))
    loader = module(Sometimes(), batch_size=16, num_workers=workers).train_dataloader()
    loader.load_state_dict({"epoch": 1, "batch": 2})  # at a position that was not read before
    assert torch.equal(torch.cat([x for x, _ in loader]), torch.cat(runs[1][1][2:]))
    assert random.getstate() == state


def test_a_dataset_that_draws_nothing_is_read_once() -> None:
    data = Pictures()
    loader = module(data).train_dataloader()
    assert data.read == 6  # two of each split, before anything else
    list(loader)
    assert data.read == 86


@pytest.mark.parametrize("n", [7, 20, 41])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_evaluation_sees_every_sample_once_in_as_many_batches_on_each_rank(n: int, replicas: int) -> None:
    held_out = Pictures(n)
    parts = [
        list(module(Pictures(), replicas, rank, val=held_out, eval_batch_size=10).val_dataloader())
        for rank in range(replicas)
    ]
    assert len({len(part) for part in parts}) == 1
    seen = torch.cat([x for part in parts for x, _ in part])
    assert sorted(seen.sum((1, 2, 3)).tolist()) == sorted(held_out.x.sum((1, 2, 3)).tolist())
    assert all(y.dtype == torch.int64 for part in parts for _, y in part)


def test_what_is_not_given_is_cut_out_of_train_by_class() -> None:
    y = torch.tensor([0] * 80 + [1] * 20)
    data = module(TensorDataset(torch.arange(100.0)[:, None], y), val_share=0.2, num_classes=2)
    data.setup()
    assert str(data) == "DatasetDataModule(train: 70, val: 20, test: 10)"
    rows = {
        name: torch.cat([x for x, _ in data.eval_loader(name)]).flatten().long() for name in ("train", "val", "test")
    }
    assert torch.equal(torch.cat(list(rows.values())).sort().values, torch.arange(100))
    assert [int(y[rows[name]].sum()) for name in ("train", "val", "test")] == [14, 4, 2]
    other = module(TensorDataset(torch.arange(100.0)[:, None], y), split_seed=1)
    assert not torch.equal(torch.cat([x for x, _ in other.val_dataloader()]).flatten().long(), rows["val"][:10])
    whole = module(Pictures(), val=Pictures(30), test=Subset(Pictures(), [3, 5]))
    whole.setup()
    assert str(whole) == "DatasetDataModule(train: 100, val: 30, test: 2)"


def test_splits_that_ignore_the_classes_warn() -> None:
    with pytest.warns(UserWarning, match=r"data\.train: Pictures has no labels at hand"):
        module(Pictures(labels_at_hand=False), num_classes=2).setup()


def test_transforms_and_collate_fn() -> None:
    given = Pictures(20)
    data = module(given, val=given, test=given, batch_size=10, transform=halve)
    assert torch.equal(torch.cat([x for x, _ in data.eval_loader("train")]), given.x / 2)
    assert torch.equal(torch.cat([x for x, _ in data.val_dataloader()]), given.x)
    data = module(given, val=given, test=given, batch_size=10, eval_transform=halve)
    assert torch.equal(torch.cat([x for x, _ in data.eval_loader("train")]), given.x)
    assert torch.equal(torch.cat([x for x, _ in data.test_dataloader()]), given.x / 2)
    assert len(list(module(Pictures(odd="shape"), collate_fn=padded).train_dataloader())) == 5


def test_a_hugging_face_dataset() -> None:
    data = module(load_columns(), input="image", target="label", val=Columns(20).with_format("torch"), **FACTS)
    data.setup()
    assert data.class_names == ["cat", "dog"]
    x, y = next(iter(data.val_dataloader()))
    assert torch.equal(x, Columns(20)._x[:10])
    assert y.tolist() == [0, 1] * 5
    assert len(list(data.test_dataloader())) == 1
    whole = next(iter(module(load_columns(None)).train_dataloader()))  # without columns the batch is a dict
    assert whole["id"][0].startswith("row ")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"channels": 3}, r"data\.channels=3"),
        ({"train": Pictures(odd="label"), "num_classes": 2}, "item 5 has the label 7"),
        ({"train": Pictures(odd="shape")}, r"so they make no batch: use data\.transform"),
        ({"transform": lambda x: x.nothing}, "AttributeError"),
        ({"batch_size": 81}, r"data\.batch_size=81"),
        ({"train": NoLength()}, "has no __len__"),
        ({"num_classes": 3, "class_names": ["a", "b"]}, r"data\.class_names has 2 names for data\.num_classes=3"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_do_not_fit_are_refused_and_leave_no_workers(
    settings: dict[str, Any], words: str, workers: int
) -> None:
    children = set(active_children())
    with pytest.raises(UserError, match=words):
        list(module(**{"train": Pictures(), "num_workers": workers, **settings}).train_dataloader())
    assert set(active_children()) <= children


# complete runs


def run_of(folder: Path, *words: str) -> dict[str, Any]:
    own = (
        "data=dataset",
        "data.train={_target_: support.own_datasets.Drawing}",
        "data.transform={_target_: support.own_datasets.Shift, by: 0.5}",
        "data.num_classes=2",
        "data.channels=1",
        "data.image_size=4",
    )
    return new_run(folder, *own, *SMALL, "data.batch_size=16", "trainer.log_every_n_steps=1", *words)


def result_of(rank: int, cfg: dict[str, Any]) -> dict[str, Any]:
    return train(cfg)


def test_two_processes_have_the_losses_of_one(tmp_path: Path) -> None:
    one, two = run_of(tmp_path / "one"), run_of(tmp_path / "two", "trainer.devices=2")
    result = train(one)
    results = on_ranks(result_of, two)
    losses = [column(Path(cfg["paths"]["run_dir"]), "train/loss") for cfg in (one, two)]
    assert len(losses[0]) == 10
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name in ("val/loss", "val/accuracy", "test/loss", "test/accuracy"):
        assert results[0][name] == pytest.approx(result[name], rel=1e-5)


@pytest.mark.parametrize(("step", "words"), [(3, ()), pytest.param(8, ("data.num_workers=1",), marks=pytest.mark.slow)])
def test_an_interruption_in_an_epoch_changes_nothing(
    tmp_path: Path, interruption: Interruption, step: int, words: tuple[str, ...]
) -> None:
    words = ("callbacks.checkpoint.every_n_train_steps=1", "callbacks.throughput=null", *words)
    whole, cut = run_of(tmp_path / "whole", *words), run_of(tmp_path / "cut", *words)
    train(whole)
    resumed = train_through(cut, [("on_train_batch_start", step)], interruption)
    assert not interruption.hook  # it was interrupted
    same(resumed, Path(whole["paths"]["run_dir"]))


def test_a_run_directory_is_enough(tmp_path: Path) -> None:
    from lathe.verbs.evaluate import evaluate

    cfg = run_of(tmp_path)
    result = train(cfg)
    request = {"split": "test", "checkpoint": "best", "batch_size": None, "output": None, "run": "x"}
    assert evaluate({**cfg, "request": request})["test/loss"] == pytest.approx(result["test/loss"], rel=1e-6)
    assert str(make_data(cfg)) == "DatasetDataModule(not set up)"
