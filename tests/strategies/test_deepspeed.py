"""Each ZeRO stage: its memory and rounding; in slow runs, losses of one process, exact resume and checkpoints."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from support.interruptions import Interruption, train_through
from support.quiet import quiet_trainer
from support.ranks import on_ranks
from support.runs import SMALL, column, new_run
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

import lathe.training.train
from lathe.errors import UserError
from lathe.strategies import deepspeed as room
from lathe.strategies.deepspeed import DeepSpeed
from lathe.trainer import Trainer

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)


class Regression(LightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 65), nn.Tanh(), nn.Linear(65, 64))
        self.optimizer = optimizer
        self.seen: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]).float(), batch[1].float())
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self) -> Optimizer:
        if self.optimizer == "adamw":
            return AdamW(self.parameters(), lr=0.01)
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches(rank: int, count: int = 5, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    shape = (count, size, 64)
    x, y = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    return list(zip(x, y, strict=True))


def fit(
    strategy: Any, optimizer: str, rank: int, devices: int = 2, size: int = 8, **arguments: Any
) -> tuple[Trainer, Regression]:
    trainer = quiet_trainer(devices=devices, strategy=strategy, **{"max_epochs": 1, **arguments})
    task = Regression(optimizer)
    trainer.fit(task, DataLoader(batches(rank, size=size), batch_size=None))
    return trainer, task


def bytes_held(trainer: Trainer, task: LightningModule) -> int:
    """Return the bytes of parameters and optimizer state in this process, counting each storage once."""
    zero = trainer.optimizers[0]
    tensors = [p.data for p in task.parameters()]
    tensors += [p.ds_tensor for p in task.parameters() if hasattr(p, "ds_tensor")]
    base = getattr(zero, "optimizer", zero)
    tensors += list(getattr(zero, "fp32_partitioned_groups_flat", getattr(zero, "single_partition_of_fp32_groups", [])))
    tensors += [value for state in base.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def smaller_things(rank: int) -> dict[str, Any]:
    """Checks that need two ranks and no run directory."""
    found: dict[str, Any] = {}
    found["bytes"] = {"ddp": bytes_held(*fit("ddp", "adamw", rank))}
    found["bytes"] |= {
        stage: bytes_held(*fit(DeepSpeed(stage=stage, persistence_threshold=0), "adamw", rank)) for stage in (1, 2, 3)
    }
    found["bf16-mixed"] = [
        fit(strategy, "sgd", rank, precision="bf16-mixed")[1].seen
        for strategy in ("ddp", DeepSpeed(stage=3, persistence_threshold=0))
    ]
    found["bf16-true"] = [
        fit("ddp", "adamw", rank)[1].seen,
        fit(DeepSpeed(stage=2), "adamw", rank, precision="bf16-true")[1].seen,
    ]
    uneven = {"size": 8 - 6 * rank, "accumulate_grad_batches": 3, "max_epochs": 3}
    found["window"] = [fit(strategy, "sgd", rank, **uneven)[1].seen for strategy in ("ddp", DeepSpeed(stage=2))]
    return found


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    return on_ranks(smaller_things, timeout=200)[0]


def test_each_stage_holds_less(small: dict[str, Any]) -> None:
    dense, one, two_, three = (small["bytes"][key] for key in ("ddp", 1, 2, 3))
    assert three <= 0.60 * dense
    assert three < one == two_ < dense


def test_bf16_mixed_is_that_of_ddp_and_bf16_true_follows_float32(small: dict[str, Any]) -> None:
    ddp, zero = small["bf16-mixed"]
    assert zero == pytest.approx(ddp, rel=1e-6)
    wide, zero = small["bf16-true"]
    assert zero != wide
    assert zero == pytest.approx(wide, rel=0.02)


def test_without_the_package_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"^strategy=deepspeed_3_offload needs DeepSpeed: pip install -e '\.\[deepspeed\]'$"
    ):
        DeepSpeed(stage=3, offload_optimizer=True)


def test_an_unfinished_window_ends_with_its_epoch_and_replicas_count_by_their_samples(small: dict[str, Any]) -> None:
    """Five batches in windows of three: the last two are a step of their own, under DeepSpeed as well."""
    ddp, zero = small["window"]
    assert zero == pytest.approx(ddp, rel=1e-5)


# -- runs; the default suite tests this law with FSDP, tensor and pipeline

COMMON = (
    *SMALL,
    "trainer.gradient_clip_val=0.5",
    "trainer.accumulate_grad_batches=3",
    "trainer.log_every_n_steps=1",
    "data.batch_size=128",
    "callbacks.checkpoint.every_n_train_steps=2",
)
ZERO = {
    "1": ("strategy=deepspeed_1",),
    "2": ("strategy=deepspeed_2",),
    "3": ("strategy=deepspeed_3", "strategy.persistence_threshold=0"),
}
OFFLOAD = {
    "2_offload": ("strategy=deepspeed_2_offload",),
    "3_offload": ("strategy=deepspeed_3_offload", "strategy.persistence_threshold=0"),
}


def train_all(rank: int, cases: list[dict[str, Any]], stopped: Sequence[dict[str, Any]] = ()) -> None:
    """Train each run in turn; those in `stopped` die in the tenth micro-batch, within a window, and resume."""
    interruption, make = Interruption(), lathe.training.train.make_callbacks
    lathe.training.train.make_callbacks = lambda cfg, task: [*make(cfg, task), interruption]
    for cfg in cases:
        train_through(cfg, [], interruption)
    for cfg in stopped:
        train_through(cfg, [("on_train_batch_start", 3)], interruption)
        assert interruption.hook == ""


def losses(cfg: dict[str, Any]) -> list[float]:
    return column(Path(cfg["paths"]["run_dir"]), "train/loss")


def result(cfg: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads((Path(cfg["paths"]["run_dir"]) / "result.json").read_text()))


def saved(cfg: dict[str, Any], name: str = "last") -> dict[str, Any]:
    return dict(torch.load(Path(cfg["paths"]["run_dir"]) / "checkpoints" / f"{name}.ckpt", weights_only=True))


def two(tmp: Path, *arguments: str) -> dict[str, Any]:
    return new_run(tmp, *arguments, "trainer.devices=2")


def flat_state(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the state of every parameter of a plain optimizer by `number.key`."""
    return {
        f"{n}.{k}": torch.as_tensor(v)
        for n, entry in state["optimizer_states"][0]["state"].items()
        for k, v in entry.items()
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """SGD with momentum on one process and by each stage on two, uninterrupted, and stopped and resumed."""
    tmp = tmp_path_factory.mktemp("logs")
    cases = {"one": new_run(tmp, *COMMON)}
    cases |= {name: two(tmp, *COMMON, *strategy) for name, strategy in ZERO.items()}
    cases |= {f"{name} again": two(tmp, *COMMON, *strategy) for name, strategy in ZERO.items()}
    on_ranks(train_all, [cases["one"]], world=1)
    again = [cases[f"{name} again"] for name in ZERO]
    on_ranks(train_all, [cases[name] for name in ZERO], again)
    return cases


@pytest.mark.law2
@pytest.mark.slow
@pytest.mark.parametrize("stage", ZERO)
def test_losses_are_those_of_one_process(runs: dict[str, Any], stage: str) -> None:
    one = losses(runs["one"])
    assert len(one) >= 8
    assert losses(runs[stage]) == pytest.approx(one, rel=1e-5)
    assert result(runs[stage])["test/loss"] == pytest.approx(result(runs["one"])["test/loss"], rel=1e-5)
    assert result(runs[stage])["test/accuracy"] == pytest.approx(result(runs["one"])["test/accuracy"], abs=1e-7)


@pytest.mark.law2
@pytest.mark.slow
@pytest.mark.parametrize("stage", ZERO)
def test_a_stopped_run_continues_bit_for_bit(runs: dict[str, Any], stage: str) -> None:
    whole, again = saved(runs[stage]), saved(runs[f"{stage} again"])
    for one, two in ((whole["state_dict"], again["state_dict"]), (flat_state(whole), flat_state(again))):
        assert all(torch.equal(two[name], value) for name, value in one.items())
    assert losses(runs[f"{stage} again"]) == losses(runs[stage])


@pytest.mark.law2
@pytest.mark.slow
@pytest.mark.parametrize("stage", ZERO)
def test_checkpoints_are_those_of_one_process(runs: dict[str, Any], stage: str) -> None:
    one, zero = saved(runs["one"]), saved(runs[stage])
    assert list(zero["state_dict"]) == list(one["state_dict"])
    assert zero["optimizer_states"][0]["param_groups"] == one["optimizer_states"][0]["param_groups"]
    assert flat_state(zero).keys() == flat_state(one).keys()
    for mine, theirs in ((zero["state_dict"], one["state_dict"]), (flat_state(zero), flat_state(one))):
        for name, value in theirs.items():
            assert mine[name].dtype == value.dtype
            torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-6)
    folder = Path(runs[stage]["paths"]["run_dir"]) / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["best.ckpt", "last.ckpt"]


@pytest.mark.law2
@pytest.mark.slow
def test_a_run_changes_its_strategy(runs: dict[str, Any], tmp_path: Path) -> None:
    """ZeRO's checkpoints resume in one process, and vice versa, with the losses of an unchanged run."""

    def continued(name: str, *strategy: str) -> dict[str, Any]:
        path = f"ckpt_path={runs[name]['paths']['run_dir']}/checkpoints/last.ckpt"
        return new_run(tmp_path, *COMMON, "trainer.max_epochs=3", "ckpt_mode=trainer", path, *strategy)

    stay, *back = (continued(name) for name in ("one", *ZERO))
    there = [continued("one", *ZERO[stage], "trainer.devices=2") for stage in ZERO]
    on_ranks(train_all, [stay, *back], world=1)
    on_ranks(train_all, there)
    assert len(losses(stay)) >= 4
    for cfg in (*back, *there):
        assert losses(cfg) == pytest.approx(losses(stay), rel=1e-4)


DEEP = ("model=deep_mlp", "model.net.width=16", "model.net.depth=4", "trainer.activation_checkpointing=blocks")


@pytest.mark.law2
@pytest.mark.slow
def test_offloaded_adaptive_optimizers_and_recomputed_blocks(tmp_path: Path) -> None:
    """Convolutions and tied weights: laws/test_law2_strategies.py."""
    common = [word for word in COMMON if not word.startswith("model")]
    common += [*DEEP, "optimizer=adamw", "optimizer.lr=0.01"]
    one = new_run(tmp_path, *common)
    zero = [two(tmp_path, *common, *strategy) for strategy in OFFLOAD.values()]
    on_ranks(train_all, [one], world=1, timeout=200)
    on_ranks(train_all, zero, timeout=400)
    for cfg in zero:
        assert losses(cfg) == pytest.approx(losses(one), rel=1e-5)
        assert flat_state(saved(cfg)).keys() == flat_state(saved(one)).keys()
