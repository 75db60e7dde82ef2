"""data=dataset: equal batches of map-style datasets on any number of devices and after interruptions."""

import random
import re
import shlex
import sys
from collections.abc import Callable
from itertools import islice
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.interruptions import Interruption, interruption, same, train_through
from support.own_datasets import (
    Columns,
    Drawing,
    Flow,
    NoLength,
    Odd,
    Pictures,
    Shift,
    Stateful,
    halve,
    load_columns,
    padded,
)
from support.runs import ROOT, SMALL, new_run
from torch.utils.data import Subset, TensorDataset

from lathe.data import DatasetDataModule
from lathe.errors import UserError
from lathe.launch.error_reporting import explain_user_code
from lathe.training.train import train

__all__ = ["interruption"]  # a fixture
FACTS = {"num_classes": 2, "channels": 1, "image_size": 4}
HELD_OUT: dict[str, Any] = {"val": Pictures(20), "test": Pictures(20)}
STREAM: dict[str, Any] = {"samples": 80, **HELD_OUT}
FLOW = {"train": Stateful(90), **STREAM}
BYTES = torch.zeros(1, 4, 4, dtype=torch.uint8)


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


@pytest.mark.parametrize(("kind", "workers"), [(Pictures, 0), (Drawing, 1)])
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


class Sometimes(Pictures):
    """Draws from torch in every third sample, and only in some of those from a second generator."""

    def __getitem__(self, row: int) -> Any:
        x, y = super().__getitem__(row)
        if row % 3 == 0:
            x = x + torch.randn(())
            x = x + (random.gauss(0, 1) if row % 2 else 0.0) + (float(np.random.normal()) if row % 15 == 0 else 0.0)
        return x, y


def test_draws_follow_the_sample_not_the_batch_and_leave_the_generators() -> None:
    """Also where a generator is drawn from in the middle of a run for the first time."""
    state = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    runs = [epochs(module(Sometimes(), batch_size=size)) for size in (1, 16)]
    for one, other in zip(*runs, strict=True):
        assert torch.equal(torch.cat(one), torch.cat(other))
    loader = module(Sometimes(), batch_size=16).train_dataloader()
    loader.load_state_dict({"epoch": 1, "batch": 2})  # at a position that was not read before
    assert torch.equal(torch.cat([x for x, _ in loader]), torch.cat(runs[1][1][2:]))
    first, second = ([x for x, _ in module(Sometimes()).val_dataloader()] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == state


def test_a_dataset_that_draws_nothing_is_read_once() -> None:
    data = Pictures()
    loader = module(data).train_dataloader()
    assert data.read == 6  # two of each split, before anything else
    list(loader)
    assert data.read == 86


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
        ({"train": Pictures(odd="label"), "num_classes": 2, "num_workers": 1}, "item 5 has the label 7"),
        ({"train": Pictures(odd="shape")}, r"make no batch .* item \d+ is .*: use data\.transform"),
        ({"train": Odd(y="cat"), "num_classes": 2}, "targets of a batch are a list of str, expected a whole number"),
        ({"train": Odd(y=torch.zeros(3)), "num_classes": 2}, r"targets of a batch are float32 \[2, 3\], expected a"),
        ({"val": Odd(BYTES), "channels": 1}, r"^data\.val: item .* expected float32: convert it"),
        ({"transform": lambda x: x.nothing}, "AttributeError"),
        ({"batch_size": 81}, r"data\.batch_size=81"),
        ({"train": NoLength()}, "has no __len__"),
        ({"num_classes": 3, "class_names": ["a", "b"]}, r"data\.class_names has 2 names for data\.num_classes=3"),
        (FLOW | {"samples": None}, r"set data\.samples"),
        (FLOW | {"samples": 97}, "Stateful ended within batch 6"),
        (FLOW | {"val": None}, "give data.val and data.test"),
        (FLOW | {"num_workers": 1}, r"data\.num_workers=1"),
    ],
)
def test_samples_and_settings_that_do_not_fit_are_refused_and_leave_no_workers(
    settings: dict[str, Any], words: str
) -> None:
    children = set(active_children())
    with pytest.raises(UserError, match=words):
        list(module(**{"train": Pictures(), **settings}).train_dataloader())
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


@pytest.mark.parametrize(
    ("y", "dtype"),
    [
        (torch.tensor([0.0, 1.0]), torch.float32),  # scores
        (torch.zeros(4, 4).long(), torch.int64),  # a picture of classes
        (torch.tensor(1, dtype=torch.uint8), torch.int64),
        (torch.tensor(True), torch.int64),
    ],
)
def test_targets_that_are_classes_or_scores(y: torch.Tensor, dtype: torch.dtype) -> None:
    data = module(Odd(y=y), num_classes=2, batch_size=4)
    data.setup()
    for batch in (next(iter(data.train_dataloader())), next(iter(data.eval_loader("val")))):
        assert (batch[1].shape[1:], batch[1].dtype) == (y.shape, dtype)


# The example of docs/own_data.md trains as printed.


def test_the_dataset_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "own_data.md").read_text().split("## A dataset of torch or Hugging Face")[1]
    code = re.findall(r"^```python\n# src/(\S+)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)[0]
    (tmp_path / code[0]).parent.mkdir()
    (tmp_path / code[0]).write_text(code[1])
    monkeypatch.syspath_prepend(tmp_path)
    command = re.findall(r"^python train.py (data=dataset .*)$", page, flags=re.MULTILINE)[0]
    small = [word for word in SMALL if word != "model=mlp"]
    try:
        assert train(new_run(tmp_path, *shlex.split(command), *small))["test/accuracy"] > 0.9
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == Path(code[0]).parts[0]]:
            del sys.modules[name]  # other tests have packages of the same name


# A sample that can't be read or is not finite is reported by its index.


BAD = 37


class Numbered:
    """Samples that equal their index; `odd` determines the one at `BAD`."""

    def __init__(self, n: int = 60, odd: str = "") -> None:
        self.n, self.odd, self.targets = n, odd, [row % 2 for row in range(n)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> Any:
        if row == BAD and self.odd == "raises":
            raise OSError("can't be decoded")
        x = torch.full((1, 4, 4), float(row))
        if row == BAD and self.odd == "infinite":
            x[0, 1, 2] = torch.inf
        return x, row % 2


class Halves:
    def __call__(self, x: Any) -> Any:
        if int(x[0, 0, 0]) == BAD:
            raise ValueError("no half of it")
        return x / 2


@pytest.mark.parametrize(
    ("split", "data", "workers"),
    [
        ("train", {"train": Numbered(odd="raises")}, 1),
        ("train", {"train": Numbered(), "transform": Halves()}, 0),
        ("val", {"train": Numbered(), "val": Numbered(odd="raises")}, 0),
    ],
)
def test_an_item_that_can_not_be_read_is_named(split: str, data: dict[str, Any], workers: int) -> None:
    own = module(**data, num_workers=workers, batch_size=1, val_share=0.2, test_share=0.02)
    with pytest.raises((OSError, ValueError)) as caught:
        list(own.train_dataloader() if split == "train" else own.val_dataloader())
    lines = str(explain_user_code(caught.value)).splitlines()
    assert lines[0].startswith(f"{type(caught.value).__name__}: ")
    assert f"while reading data.{split}: item {BAD}" in lines


def test_one_that_is_not_finite_is_named_where_it_stops_the_run(tmp_path: Any) -> None:
    kind = f"{__name__}.Numbered"
    words = (f"data.train={{_target_: {kind}, odd: infinite}}", f"data.val={{_target_: {kind}, n: 20}}")
    own = ("data=dataset", *words, f"data.test={{_target_: {kind}, n: 20}}", "data.num_classes=2")
    shape = ("data.channels=1", "data.image_size=4", "data.batch_size=60", "trainer.log_every_n_steps=1")
    with pytest.raises(UserError, match=rf"holds inf \(batch\[0\], in row \d+ of 60: data\.train: item {BAD}\)"):
        train(new_run(tmp_path, *own, *SMALL, *shape))


# data=dataset with an iterable dataset: in its own order, on any number of devices, resumed.


def test_samples_come_in_their_own_order_and_draw_by_epoch_and_sample() -> None:
    flow = Stateful()
    loader = module(flow, **STREAM).train_dataloader()
    first, second = ([x for x, _ in loader] for _ in range(2))
    assert len(loader) == len(first) == len(second) == 5
    assert flow.epochs == [0, 1]
    assert torch.allclose(torch.cat(first), flow.x[:80], atol=0.6)
    assert not torch.equal(first[0], second[0])
    again = module(Stateful(), **STREAM, batch_size=8).train_dataloader()
    assert torch.equal(torch.cat([x for x, _ in again]), torch.cat(first))


@pytest.mark.parametrize(("kind", "replicas"), [(Flow, 2), (Stateful, 4)])
def test_ranks_divide_each_global_batch_and_resume_in_it(kind: Any, replicas: int) -> None:
    """A dataset without a state is read again up to its place."""
    given: dict[str, Any] = STREAM | {"eval_batch_size": 10}
    whole = epochs(module(kind(), **given))
    evaluated = torch.cat([x for x, _ in module(Flow(), **{**given, "val": kind(23)}).val_dataloader()])
    parts, held_out = [], []
    for rank in range(replicas):
        loader = module(kind(), replicas, rank, **given).train_dataloader()
        head = [x for x, _ in islice(loader, 3)]
        other = module(kind(), replicas, rank, **given).train_dataloader()
        other.load_state_dict(loader.state_dict())
        parts.append([[*head, *(x for x, _ in other)], [x for x, _ in other]])
        held_out.append([x for x, _ in module(Flow(), replicas, rank, **{**given, "val": kind(23)}).val_dataloader()])
    for epoch in range(2):
        assert len(whole[epoch]) == 5
        for number, batch in enumerate(whole[epoch]):  # every replicas-th sample
            assert torch.equal(torch.stack([part[epoch][number] for part in parts], 1).flatten(0, 1), batch)
    assert len({len(part) for part in held_out}) == 1  # the last 3 samples join a batch where 4 ranks share them
    assert all(len(x) for part in held_out for x in part)
    assert torch.equal(torch.cat([torch.cat(part) for part in held_out]).sort(0).values, evaluated.sort(0).values)


def test_a_rank_without_samples_is_refused() -> None:
    with pytest.raises(UserError, match=r"^data\.val: a batch of 3 leaves one of 4 replicas without samples"):
        list(module(Flow(), 4, 0, samples=80, val=Flow(3), test=Flow(3)).val_dataloader())


class Once(Flow):
    """Its own iterator, which cannot be started again."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self.x[0], 0


def test_an_iterator_warns_on_one_process_and_is_refused_on_several() -> None:
    told = r"data\.train: Once is its own iterator, which a continued run cannot read again"
    with pytest.warns(UserWarning, match=told):
        module(Once(), **STREAM).train_dataloader()
    with pytest.raises(UserError, match=told):
        module(Once(), 2, **STREAM).train_dataloader()


def stream_run(folder: Path, kind: str, *words: str) -> dict[str, Any]:
    nodes = [
        f"data.{name}={{_target_: support.own_datasets.{one}}}"
        for name, one in (("train", kind), ("val", "Flow"), ("test", "Pictures"))
    ]
    facts = ("data.num_classes=2", "data.channels=1", "data.image_size=4", "data.samples=96", "data.batch_size=16")
    return new_run(folder, "data=dataset", *nodes, *SMALL, *facts, "trainer.log_every_n_steps=1", *words)


def test_an_interruption_in_an_epoch_of_an_iterable_changes_nothing(tmp_path: Path, interruption: Interruption) -> None:
    words = ("callbacks.checkpoint.every_n_train_steps=1", "callbacks.throughput=null")
    whole, cut = (stream_run(tmp_path / name, "Stateful", *words) for name in ("whole", "cut"))
    train(whole)
    resumed = train_through(cut, [("on_train_batch_start", 8)], interruption)
    assert not interruption.hook  # it was interrupted
    same(resumed, Path(whole["paths"]["run_dir"]))


def test_classes_that_a_split_lacks_warn() -> None:
    x, y = torch.randn(60, 1, 4, 4), torch.tensor([0, 1] * 29 + [2, 2])
    with pytest.warns(UserWarning, match=r"^data\.train: val has none of newt, and test has none of newt, so"):
        module(TensorDataset(x, y), num_classes=3, class_names=["cat", "dog", "newt"]).setup()
    values = module(TensorDataset(x, y))  # integers that need not be classes
    values.setup()
    assert str(values).startswith("DatasetDataModule(train: 48")
