"""The average follows its formula, and is evaluated and saved."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from support.net_state import Saves, assert_same, copy_of
from support.ranks import on_ranks
from support.tiny import TinyLoader, TinyTask, make_trainer, save_after
from torch import Tensor, nn

from lathe.callbacks.ema import EMA
from lathe.errors import UserError


class Recorder(Callback):
    """Records the raw weights after each step, and those during validation."""

    def __init__(self) -> None:
        self.trained: dict[int, dict[str, Tensor]] = {}
        self.validated: list[dict[str, Tensor]] = []
        self.after_validation: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.trained[trainer.global_step] = copy_of(pl_module.net)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.validated.append(copy_of(pl_module.net))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.after_validation.append(copy_of(pl_module.net))


def by_hand(trained: dict[int, dict[str, Tensor]], ema: EMA) -> dict[str, Tensor]:
    """Return the average of the recorded weights; what is not averaged is a copy of the last update's."""
    average: dict[str, Tensor] = {}
    steps = range(ema.start_step + ema.every_n_steps, max(trained) + 1, ema.every_n_steps)
    for updates, step in enumerate(steps):
        decay = min(ema.decay, (1 + updates) / (10 + updates)) if ema.warmup else ema.decay
        for name, raw in trained[step].items():
            averaged = updates > 0 and raw.is_floating_point()
            average[name] = decay * average[name] + (1 - decay) * raw.double() if averaged else raw.double()
    return average


@pytest.mark.parametrize(
    "options",
    [
        {"decay": 0.9, "warmup": False},
        {"decay": 0.5, "warmup": True},
        {"decay": 0.9, "warmup": False, "every_n_steps": 3},
        {"decay": 0.9, "warmup": False, "start_step": 4, "every_n_steps": 2},
        {"decay": 0.9, "warmup": False, "buffers": "copy"},
    ],
)
def test_the_average_is_the_one_on_paper(tiny: SimpleNamespace, options: dict[str, Any]) -> None:
    ema, recorder, task = EMA(**options), Recorder(), tiny.Task()
    tiny.trainer(recorder, ema).fit(task, tiny.Loader())
    expected, last = by_hand(recorder.trained, ema), recorder.trained[12]
    for name, tensor in task.net.state_dict().items():
        stays = not tensor.is_floating_point() or (ema.buffers == "copy" and "running" in name)
        assert torch.equal(tensor, last[name]) == stays, name
        if not stays:
            torch.testing.assert_close(tensor, expected[name].to(tensor.dtype), rtol=1e-5, atol=1e-6)
    assert ema.updates == (12 - ema.start_step) // ema.every_n_steps


@pytest.mark.parametrize("strips", [True, False])
def test_checkpoint_holds_average_under_plain_names_and_raw_beside(
    tiny: SimpleNamespace, tmp_path: Path, strips: bool
) -> None:
    recorder, task = Recorder(), tiny.Task(strips=strips)
    # Before the first update there are only the raw weights.
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    tiny.trainer(EMA(decay=0.9, warmup=False, start_step=2), recorder, checkpoint).fit(task, tiny.Loader())
    prefix = "" if strips else "net."
    early = torch.load(tmp_path / "step=2.ckpt", weights_only=True)
    assert_same(early["state_dict"], {prefix + k: v for k, v in recorder.trained[2].items()})
    saved = torch.load(tmp_path / "step=12.ckpt", weights_only=True)
    assert_same(saved["state_dict"], {prefix + k: v for k, v in copy_of(task.net).items()})
    for name, raw in saved["ema"]["raw"].items():
        assert torch.equal(raw, recorder.trained[12][name])
    assert saved["ema"]["updates"] == 10
    plain = tiny.Task().net
    plain.load_state_dict({k.removeprefix(prefix): v for k, v in saved["state_dict"].items()}, strict=True)


# The trainer that tests has none of the callbacks of the trainer that trained.
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_validation_and_best_checkpoint_see_the_average(tiny: SimpleNamespace, tmp_path: Path) -> None:
    recorder = Recorder()
    checkpoint = ModelCheckpoint(tmp_path, monitor="val/accuracy", save_top_k=-1, filename="{epoch}")
    ema = EMA(decay=0.9, warmup=False)
    tiny.trainer(ema, recorder, checkpoint).fit(tiny.Task(), tiny.Loader())
    for epoch, last in enumerate((6, 12)):
        expected = by_hand({s: w for s, w in recorder.trained.items() if s <= last}, ema)
        for name, tensor in recorder.validated[epoch].items():
            if tensor.is_floating_point():
                torch.testing.assert_close(tensor, expected[name].float(), rtol=1e-5, atol=1e-6)
        assert_same(recorder.after_validation[epoch], recorder.trained[last])
        saved = torch.load(tmp_path / f"epoch={epoch}.ckpt", weights_only=True)
        assert_same(saved["state_dict"], recorder.validated[epoch])
    # Another trainer, without the EMA callback, tests the same weights.
    tester = tiny.Task()
    tiny.trainer().test(tester, tiny.Loader(1), ckpt_path=str(tmp_path / "epoch=0.ckpt"), verbose=False)
    assert_same(copy_of(tester.net), recorder.validated[0])


def test_low_precision_weights_are_averaged_in_float32(tiny: SimpleNamespace, tmp_path: Path) -> None:
    ema, task = EMA(decay=0.999, warmup=False), tiny.Task(nn.Linear(3, 2).bfloat16())
    tiny.trainer(ema, Saves(tmp_path), precision="bf16-true").fit(task, tiny.Loader(dtype=torch.bfloat16))
    saved = torch.load(tmp_path / "step=12.ckpt", weights_only=True)
    assert saved["ema"]["average"]["weight"].dtype == torch.float32
    assert saved["state_dict"]["weight"].dtype == torch.bfloat16
    raw = {s: torch.load(tmp_path / f"step={s}.ckpt", weights_only=True)["ema"]["raw"] for s in range(1, 13)}
    torch.testing.assert_close(
        saved["ema"]["average"]["weight"].double(), by_hand(raw, ema)["weight"], rtol=1e-5, atol=1e-6
    )
    # In bfloat16 an update of a thousandth is rounded away, and the average would remain the first copy.
    assert not torch.equal(saved["ema"]["average"]["weight"], raw[1]["weight"].float())


def test_tied_weights_share_one_average(tiny: SimpleNamespace, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3, bias=False))
    net[2].weight = net[0].weight
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=12, filename="tied")
    tiny.trainer(EMA(decay=0.5), checkpoint).fit(tiny.Task(net), tiny.Loader())
    state = torch.load(tmp_path / "tied.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(state["0.weight"], state["2.weight"])
    assert torch.equal(state["0.weight"], net[0].weight)


def test_an_exception_inside_validation_leaves_the_raw_weights(tiny: SimpleNamespace) -> None:
    class Fails(Callback):
        def on_validation_batch_end(self, *args: Any) -> None:
            raise ZeroDivisionError

    recorder, task = Recorder(), tiny.Task()
    with pytest.raises(ZeroDivisionError):
        tiny.trainer(recorder, EMA(decay=0.5), Fails()).fit(task, tiny.Loader())
    assert_same(copy_of(task.net), recorder.trained[6])


def average_on_a_rank(rank: int) -> list[dict[str, Tensor]]:
    """Train on batches of this rank's own, so that BatchNorm's statistics differ; return the validated weights."""
    recorder, loader = Recorder(), TinyLoader()
    loader.batches = [(x * (1 + 3 * rank), y) for x, y in loader.batches]
    trainer = make_trainer(recorder, EMA(decay=0.9), devices=2, strategy="ddp", use_distributed_sampler=False)
    trainer.fit(TinyTask(), loader)
    return recorder.validated


def test_two_processes_evaluate_one_average() -> None:
    first, second = on_ranks(average_on_a_rank)
    assert len(first) == 2
    for one, other in zip(first, second, strict=True):
        floating = [name for name, value in one.items() if value.is_floating_point()]
        assert all(torch.equal(one[name], other[name]) for name in floating)


@pytest.mark.law3
def test_a_checkpoint_between_step_and_update_loses_nothing(tiny: SimpleNamespace, tmp_path: Path) -> None:
    whole, parts, options = tiny.Task(), tiny.Task(), {"decay": 0.9, "every_n_steps": 2, "start_step": 2}
    tiny.trainer(save_after(4, tmp_path / "early.ckpt"), EMA(**options)).fit(whole, tiny.Loader())
    tiny.trainer(EMA(**options)).fit(parts, tiny.Loader(), ckpt_path=str(tmp_path / "early.ckpt"))
    assert_same(copy_of(parts.net), copy_of(whole.net))


def test_an_average_of_nothing_is_refused(tiny: SimpleNamespace) -> None:
    with pytest.raises(UserError, match="above the run's 12 optimizer steps less every_n_steps=10"):
        tiny.trainer(EMA(start_step=3, every_n_steps=10)).fit(tiny.Task(), tiny.Loader())
