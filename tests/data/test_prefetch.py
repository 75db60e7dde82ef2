"""trainer.prefetch_to_device: one batch ahead on a side stream; positions count consumed batches."""

import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from data.test_dataset import HELD_OUT, module
from lightning.pytorch import LightningDataModule, LightningModule
from support.own_datasets import Drawing, Stateful, padded

from lathe.data import transfer
from lathe.data.augment import Augment
from lathe.data.transfer import go_ahead, one_ahead, tell_no_effect

Make = Callable[..., Any]


class StandIn:
    """A stand-in for a stream that runs inline and counts batches."""

    def __init__(self) -> None:
        self.made = 0

    def begin(self) -> None:
        pass

    def start(self, batches: Iterator[Any]) -> tuple[Any, int]:
        batch = next(batches)
        self.made += 1
        return batch, self.made

    def take(self, batch: Any, event: int) -> None:
        pass


def test_what_is_raised_comes_in_its_place() -> None:
    def broken() -> Iterator[int]:
        yield from (0, 1)
        raise OSError("batch 2")

    batches = one_ahead(broken(), StandIn())
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(OSError, match=r"^batch 2$"):
        next(batches)
    assert list(batches) == []


@pytest.mark.law3
@pytest.mark.parametrize("kind", ["resident", "workers"])
@pytest.mark.parametrize("limit", [None, 3])
def test_the_position_counts_what_was_taken(make: Make, kind: str, limit: int | None) -> None:
    def loader(side: StandIn | None) -> Any:
        made = make(kind, batch_size=12, limit=limit, augment=Augment(crop=1, flip="random"))  # 4 batches an epoch
        assert made.goes_ahead
        made.side = side
        return made

    def taken(one: Any, epochs: int = 2) -> list[Any]:
        return [(x, y, one.state_dict()) for _ in range(epochs) for x, y in islice(one, limit)]

    plain, side = taken(loader(None)), StandIn()
    ahead = taken(loader(side))
    assert side.made == 8  # no batch twice
    assert len(plain) == len(ahead) == (8 if limit is None else 6)
    for one, other in zip(plain, ahead, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
        assert one[2] == other[2]
    again = loader(StandIn())
    again.load_state_dict(ahead[1][2])  # after two batches, with the third already prepared
    x, _ = next(iter(again))
    assert torch.equal(x, plain[2][0])
    assert again.state_dict() == plain[2][2]


def test_what_draws_where_the_run_draws_is_not_made_ahead() -> None:
    """A resumed run would draw other numbers."""
    assert not module(Drawing(40), collate_fn=padded).train_dataloader().goes_ahead
    assert not module(Drawing(40), collate_fn=padded).val_dataloader().goes_ahead
    assert module(Drawing(40), collate_fn=padded, num_workers=1).train_dataloader().goes_ahead
    assert not module(Stateful(40), samples=40, **HELD_OUT).train_dataloader().goes_ahead


@pytest.mark.parametrize(
    ("wanted", "device", "chunk", "ahead"),
    [
        (False, "cuda", 1, False),
        ("auto", "cpu", 1, False),
        ("auto", "cuda", 1, True),
        ("auto", "cuda", 2, False),
        (True, "cuda", 2, True),
    ],
)
def test_auto_prefetches_single_batches_on_gpus(
    wanted: Any, device: str, chunk: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "SideStream", lambda device, moves: StandIn())
    loader = SimpleNamespace(goes_ahead=True, chunk=chunk, side=None)
    trainer = SimpleNamespace(
        prefetch_to_device=wanted, lightning_module=LightningModule(), datamodule=LightningDataModule()
    )
    go_ahead(loader, trainer, torch.device(device))
    assert (loader.side is not None) is ahead


def test_true_without_an_effect_warns() -> None:
    with pytest.warns(UserWarning, match=r"^trainer\.prefetch_to_device=true has no effect on batches of object"):
        go_ahead(object(), SimpleNamespace(prefetch_to_device=True), torch.device("cuda"))
    with pytest.warns(UserWarning, match=r"^trainer\.prefetch_to_device=true has no effect"):
        tell_no_effect(True, torch.device("cpu"))
    with warnings.catch_warnings(action="error"):
        tell_no_effect("auto", torch.device("cpu"))
        tell_no_effect(True, torch.device("cuda"))
