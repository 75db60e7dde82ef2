"""Batches on a GPU are the same from memory, from workers, pinned and prefetched."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from support.gpu import PLAIN, TOKENS, Acceptance, close

from lathe.data import loader as stream

WORKERS = ("data.loader=workers", "data.num_workers=1", "data.prefetch_factor=2")


class Batches(Callback):
    """Records the images of each training batch, and the devices of these and of the loader's images."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.devices: set[str] = set()
        self.made: set[str] = set()
        self.ahead = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ahead = getattr(trainer.train_dataloader, "side", None) is not None
        copy = trainer.strategy.batch_to_device

        def copied(batch: Any, *more: Any, **named: Any) -> Any:
            self.made |= {part.device.type for part in batch if isinstance(part, torch.Tensor)}
            return copy(batch, *more, **named)

        trainer.strategy.batch_to_device = copied  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        self.seen.append(batch[0].cpu())
        self.devices.add(batch[0].device.type)


def watched(gpu: Acceptance, *words: str) -> tuple[Batches, list[float]]:
    watch = Batches()
    return watch, gpu.curve(*PLAIN, "data.augment.crop=1", "data.augment.flip=random", *words, watch=watch)


def test_resident_images_are_on_the_device(gpu: Acceptance) -> None:
    watch, losses = watched(gpu)
    assert watch.devices == {gpu.device.type}
    assert watch.made == {gpu.device.type}  # a step copies nothing
    close(losses, gpu.reference(*PLAIN, "data.augment.crop=1", "data.augment.flip=random"), 1e-4)


@pytest.mark.stand_in("true")
@pytest.mark.parametrize("pinned", ["true", "false"])
def test_workers_give_the_same_batches(gpu: Acceptance, pinned: str) -> None:
    resident, losses = watched(gpu)
    workers, again = watched(gpu, *WORKERS, f"data.pin_memory={pinned}")
    assert len(resident.seen) == len(workers.seen) == 4
    assert all(torch.equal(a, b) for a, b in zip(resident.seen, workers.seen, strict=True))
    assert workers.devices == {gpu.device.type}
    close(again, losses, 1e-6)


@pytest.mark.parametrize("pinned", [True, False])
def test_pinned_batches_are_page_locked(gpu: Acceptance, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches from workers, which the loader copies to the device itself."""
    read: list[bool] = []

    class Watched(stream.Reader):
        def __iter__(self) -> Iterator[Any]:
            for raw in super().__iter__():
                read.append(raw.is_pinned())
                yield raw

    monkeypatch.setattr(stream, "Reader", Watched)
    watched(gpu, *WORKERS, f"data.pin_memory={str(pinned).lower()}")
    assert set(read) == {pinned and gpu.real}


@pytest.mark.stand_in("")
@pytest.mark.parametrize("words", ["", " ".join(WORKERS), "data.batch_size=32 data.image_size=128"])
def test_batches_are_made_ahead_on_a_stream_of_their_own(gpu: Acceptance, words: str) -> None:
    """With images in memory, with workers, and with batches made one by one."""
    plain, losses = watched(gpu, *words.split())
    ahead, again = watched(gpu, *words.split(), f"trainer.prefetch_to_device={str(gpu.real).lower()}")
    assert all(torch.equal(a, b) for a, b in zip(plain.seen, ahead.seen, strict=True))
    assert ahead.devices == {gpu.device.type}
    assert ahead.ahead is gpu.real
    close(again, losses, 1e-6)


def test_tokens(gpu: Acceptance) -> None:
    close(gpu.curve(*TOKENS), gpu.reference(*TOKENS), 1e-4)
