"""The first layer from training images: the same on each process, kept by a run that goes on."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.interruptions import NEVER, Interrupted, Interruption, interruption
from support.runs import SMALL, config, new_run

from lathe import trust
from lathe.callbacks.whitening import Whitening
from lathe.config.composed import check
from lathe.errors import UserError
from lathe.nets import Airbench
from lathe.runs.build import make_data
from lathe.tasks import ClassificationTask
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
    pixels = (torch.from_numpy(images[:200]) / 255 - torch.tensor(data.mean)[:, None, None]) / torch.tensor(data.std)[
        :, None, None
    ]
    torch.testing.assert_close(data.first_images(200), pixels)
    net = Airbench(width=4, growth=1, in_channels=1, image_size=data.image_size, num_classes=10)
    net.whiten(pixels)
    state = state_of(cfg)
    torch.testing.assert_close(state["whitening.weight"], net.whitening.weight, rtol=1e-3, atol=1e-3)
    assert state["whitened"]


def test_weights_of_elsewhere_stay(tmp_path: Path) -> None:
    first = new_run(tmp_path / "first", *AIRBENCH)
    train(first)
    second = new_run(
        tmp_path / "second",
        *AIRBENCH,
        "callbacks.whitening.samples=20",
        f"ckpt_path={first['paths']['run_dir']}/checkpoints/last.ckpt",
    )
    train(second)
    assert torch.equal(state_of(first)["whitening.weight"], state_of(second)["whitening.weight"])


def test_what_cannot_be_whitened_is_refused(tmp_path: Path) -> None:
    cfg = new_run(tmp_path / "net", *SMALL, "callbacks=[default,whitening]", "test=false")
    with pytest.raises(UserError, match=r"^callbacks\.whitening: MLP has no layer to whiten: leave it out\.$"):
        train(cfg)
    trust.allow({"trusted": ["support"]})
    data = ["data=dataset", "data.train={_target_: support.own_datasets.Pictures}", "data.num_classes=2"]
    cfg = new_run(tmp_path / "data", *AIRBENCH, *data, "data.channels=1", "data.image_size=4")
    with pytest.raises(UserError, match=r"^callbacks\.whitening: DatasetDataModule has no first_images"):
        train(cfg)


@pytest.mark.law3
def test_its_bias_settles(tmp_path: Path, interruption: Interruption) -> None:
    """From the epoch on it is as it was, and only then; also in a run that goes on."""

    def run(name: str, step: int, *words: str) -> dict[str, torch.Tensor]:
        settings = ("trainer.max_epochs=4", "trainer.limit_train_batches=2", "trainer.log_every_n_steps=1")
        cfg = new_run(
            tmp_path / name,
            *AIRBENCH,
            *settings,
            "scheduler=constant",
            "callbacks.checkpoint.every_n_train_steps=1",
            *words,
        )
        interruption.hook, interruption.step = "on_train_batch_start", step
        if step < NEVER:
            with pytest.raises(Interrupted):
                train(cfg)
            interruption.step = NEVER
        train(cfg)
        return state_of(cfg)

    settled = run("settled", NEVER, "callbacks.whitening.settle_epoch=2")
    short = run("short", NEVER, "trainer.max_epochs=2")
    assert not torch.equal(short["whitening.bias"], torch.zeros_like(short["whitening.bias"]))
    assert torch.equal(settled["whitening.bias"], short["whitening.bias"])
    assert not torch.equal(settled["head.weight"], short["head.weight"])
    again = run("again", 7, "callbacks.whitening.settle_epoch=2")
    assert all(torch.equal(again[name], settled[name]) for name in settled)


def test_what_can_not_settle_is_told(tmp_path: Path) -> None:
    settles = (*AIRBENCH, "callbacks.whitening.settle_epoch=1")
    (told,) = check(config(*settles, "compile=default"))
    assert told.startswith("callbacks.whitening.settle_epoch=1 takes a weight out of training, which compiled code")
    with pytest.warns(UserWarning, match="settle_epoch=1 never comes in a run of trainer.max_epochs=1"):
        train(new_run(tmp_path, *settles))
    callback, net = Whitening(settle_epoch=1), Airbench(width=4, growth=1, in_channels=1, image_size=8, num_classes=10)
    task = ClassificationTask(net)
    data = SimpleNamespace(first_images=lambda n: torch.rand(n, 1, 8, 8))
    for world, compiled in ((2, False), (1, True)):
        net._compiled_call_impl = print if compiled else None
        with pytest.raises(UserError, match="which compiled code and several processes do not follow: set it to null"):
            callback.setup(SimpleNamespace(datamodule=data, world_size=world, is_global_zero=True), task, "fit")  # type: ignore[arg-type]
