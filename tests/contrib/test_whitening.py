"""The first layer from training images: the same on each process, kept by a resumed run."""

from pathlib import Path

import pytest
import torch
from support.interruptions import Interruption, interruption, train_through
from support.runs import SMALL, new_run

from lathe.nets import Airbench
from lathe.runs.build import make_data
from lathe.training.train import train

__all__ = ["interruption"]  # a fixture

AIRBENCH = (
    *(word for word in SMALL if not word.startswith("model")),
    "model=airbench",
    "model.net.width=4",
    "model.net.growth=1",
    "data.image_size=24",
    "callbacks=[default,whitening]",
    "callbacks.whitening.samples=200",
    "optimizer=muon",
    "optimizer.rest=sgd",
    "scheduler=linear",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=5",
    "trainer.limit_val_batches=1",
    "test=false",
)


def state_of(cfg: dict) -> dict[str, torch.Tensor]:
    path = Path(cfg["paths"]["run_dir"]) / "checkpoints" / "last.ckpt"
    state = torch.load(path, weights_only=True)["state_dict"]
    return {name.removeprefix("net."): tensor for name, tensor in state.items()}


def test_a_run_begins_with_it(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *AIRBENCH)
    train(cfg)
    data = make_data(cfg)
    images, _ = data.open()["train"].read()
    mean, std = (torch.tensor(values)[:, None, None] for values in (data.mean, data.std))
    pixels = (torch.from_numpy(images[:200]) / 255 - mean) / std
    torch.testing.assert_close(data.first_images(200), pixels)
    net = Airbench(width=4, growth=1, in_channels=1, image_size=data.image_size, num_classes=10)
    net.whiten(pixels)
    state = state_of(cfg)
    torch.testing.assert_close(state["whitening.weight"], net.whitening.weight, rtol=1e-3, atol=1e-3)
    assert state["whitened"]


@pytest.mark.law3
def test_its_bias_settles(tmp_path: Path, interruption: Interruption) -> None:
    """It is frozen from the given epoch only; also in a resumed run."""

    options = (
        *AIRBENCH,
        *("trainer.max_epochs=3", "trainer.limit_train_batches=2", "trainer.log_every_n_steps=1"),
        *("scheduler=constant", "callbacks.checkpoint.every_n_train_steps=1"),
    )

    def run(name: str, deaths: list[tuple[str, int]], *words: str) -> dict[str, torch.Tensor]:
        cfg = new_run(tmp_path / name, *options, *words)
        train_through(cfg, deaths, interruption)
        return state_of(cfg)

    settled = run("settled", [], "callbacks.whitening.settle_epoch=1")
    short = run("short", [], "trainer.max_epochs=1")
    assert not torch.equal(short["whitening.bias"], torch.zeros_like(short["whitening.bias"]))
    assert torch.equal(settled["whitening.bias"], short["whitening.bias"])
    assert not torch.equal(settled["head.weight"], short["head.weight"])
    again = run("again", [("on_train_batch_start", 5)], "callbacks.whitening.settle_epoch=1")
    assert all(torch.equal(again[name], settled[name]) for name in settled)
