"""data=dataset with an iterable dataset: in its order, resumed if possible, refused on several devices."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.interruptions import Interruption, interruption, same, train_through
from support.own_datasets import Flow, Pictures, Stateful
from support.runs import SMALL, new_run

from lathe.data import DatasetDataModule
from lathe.errors import UserError
from lathe.training.train import train

__all__ = ["interruption"]  # a fixture
HELD_OUT: dict[str, Any] = {"val": Pictures(20), "test": Pictures(20)}


def module(dataset: Any, **settings: Any) -> DatasetDataModule:
    return DatasetDataModule(dataset, **{"batch_size": 16, "samples": 80, **HELD_OUT, **settings})


def test_samples_come_in_their_own_order_and_draw_by_epoch_and_sample() -> None:
    flow = Stateful()
    loader = module(flow).train_dataloader()
    first, second = ([x for x, _ in loader] for _ in range(2))
    assert len(loader) == len(first) == len(second) == 5
    assert flow.epochs == [0, 1]
    assert torch.allclose(torch.cat(first), flow.x[:80], atol=0.6)
    assert not torch.equal(first[0], second[0])
    again = module(Stateful(), batch_size=8).train_dataloader()
    assert torch.equal(torch.cat([x for x, _ in again]), torch.cat(first))


def test_a_loader_resumes_where_its_state_is() -> None:
    loader = module(Stateful()).train_dataloader()
    whole = [x for x, _ in loader]
    cut = module(Stateful()).train_dataloader()
    for number, _ in enumerate(cut):
        if number == 2:
            break
    state = cut.state_dict()
    assert state == {"epoch": 0, "batch": 3, "dataset": {"at": 48}}
    other = module(Stateful()).train_dataloader()
    other.load_state_dict(state)
    rest = [x for x, _ in other]
    assert len(rest) == 2
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[3:], strict=True))
    assert len(list(other)) == 5


def test_a_dataset_without_a_state_warns() -> None:
    with pytest.warns(
        UserWarning, match=r"data\.train: Flow has no state_dict and load_state_dict, so a run that is co"
    ):
        loader = module(Flow()).train_dataloader()
    loader.load_state_dict({"epoch": 0, "batch": 2})
    assert len(list(loader)) == 3


def test_evaluation_of_an_iterable_has_each_sample_once() -> None:
    data = module(Stateful(), val=Flow(20))
    assert [len(y) for _, y in data.val_dataloader()] == [16, 4]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"samples": None}, r"Stateful is iterable and has no __len__: give data\.samples"),
        ({"samples": 97}, "Stateful ended within batch 6"),
        ({"val": None}, r"data\.val: nothing can be cut out of Stateful"),
        ({"num_workers": 1}, r"data\.num_workers=1"),
    ],
)
def test_settings_that_an_iterable_cannot_have_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        list(module(Stateful(90), **settings).train_dataloader())


def test_several_processes_refuse_it() -> None:
    from types import SimpleNamespace

    data = module(Stateful())
    strategy = SimpleNamespace(
        distributed_sampler_kwargs={"num_replicas": 2, "rank": 0}, root_device=torch.device("cpu")
    )
    data.trainer = SimpleNamespace(strategy=strategy, limit_train_batches=1.0, overfit_batches=0)  # type: ignore[assignment]
    with pytest.raises(
        UserError, match=r"^data\.train: Stateful is iterable and cannot be shared out exactly among 2 "
    ):
        data.train_dataloader()


def test_an_interruption_in_an_epoch_changes_nothing(tmp_path: Path, interruption: Interruption) -> None:
    node = "{_target_: support.own_datasets.%s}"
    words = [
        f"data.{name}={node % kind}"
        for name, kind in (("train", "Stateful"), ("val", "Pictures"), ("test", "Pictures"))
    ]
    facts = ("data.num_classes=2", "data.channels=1", "data.image_size=4", "data.samples=96")
    every = ("callbacks.checkpoint.every_n_train_steps=1", "callbacks.throughput=null", "data.batch_size=16")
    whole, cut = (
        new_run(tmp_path / name, "data=dataset", *words, *facts, *SMALL, *every, "trainer.log_every_n_steps=1")
        for name in ("whole", "cut")
    )
    train(whole)
    resumed = train_through(cut, [("on_train_batch_start", 8)], interruption)
    assert not interruption.hook  # it was interrupted
    same(resumed, Path(whole["paths"]["run_dir"]))
