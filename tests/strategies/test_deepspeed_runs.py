"""ZeRO's stages: the losses of one process, bit-exact resume, and checkpoints in the plain format."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from support.runs import SMALL, column, new_run
from torch import Tensor

from lathe.tasks import Task

# not in the default suite, which tests ZeRO in test_deepspeed.py and this law with FSDP, tensor and pipeline
pytestmark = [pytest.mark.law2, pytest.mark.slow]

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

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


STOP_AT = 10  # micro-batches


def train_all(rank: int, cases: list[dict[str, Any]], stopped: Sequence[dict[str, Any]] = ()) -> list[int]:
    """Train each run in turn; those in `stopped` end abruptly after micro-batch STOP_AT and resume. Return the steps of
    their checkpoints at that time.
    """
    from lathe.training.train import train

    class Killed(Exception):
        pass

    batches = [0]

    def count(self: Task, batch: Any, batch_idx: int) -> None:
        batches[0] += 1
        if batches[0] == STOP_AT:
            raise Killed

    for cfg in cases:
        train(cfg)
    Task.on_train_batch_start = count  # type: ignore[method-assign]
    for cfg in stopped:
        batches[0] = 0
        with pytest.raises(Killed):
            train(cfg)
    steps = [int(saved(cfg)["global_step"]) for cfg in stopped]
    del Task.on_train_batch_start
    for cfg in stopped:
        train(cfg)
    return steps


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
    steps, _ = on_ranks(train_all, [cases[name] for name in ZERO], again)
    assert steps == [2, 2, 2], "each was stopped in its first epoch, behind its first checkpoint"
    return cases


@pytest.mark.parametrize("stage", ZERO)
def test_losses_are_those_of_one_process(runs: dict[str, Any], stage: str) -> None:
    one = losses(runs["one"])
    assert len(one) >= 8
    assert losses(runs[stage]) == pytest.approx(one, rel=1e-5)
    assert result(runs[stage])["test/loss"] == pytest.approx(result(runs["one"])["test/loss"], rel=1e-5)
    assert result(runs[stage])["test/accuracy"] == pytest.approx(result(runs["one"])["test/accuracy"], abs=1e-7)


@pytest.mark.parametrize("stage", ZERO)
def test_a_stopped_run_goes_on_bit_for_bit(runs: dict[str, Any], stage: str) -> None:
    whole, again = saved(runs[stage]), saved(runs[f"{stage} again"])
    for name, value in whole["state_dict"].items():
        assert torch.equal(again["state_dict"][name], value), name
    for name, value in flat_state(whole).items():
        assert torch.equal(flat_state(again)[name], value), name
    assert losses(runs[f"{stage} again"]) == losses(runs[stage])


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


@pytest.mark.parametrize("stage", ZERO)
def test_a_run_changes_its_strategy(runs: dict[str, Any], tmp_path: Path, stage: str) -> None:
    """ZeRO's checkpoint resumes in one process, and vice versa, with the losses of an unchanged run."""
    longer = (*COMMON, "trainer.max_epochs=3", "ckpt_mode=trainer")

    def last(name: str) -> str:
        return f"ckpt_path={runs[name]['paths']['run_dir']}/checkpoints/last.ckpt"

    stay, back = new_run(tmp_path, *longer, last("one")), new_run(tmp_path, *longer, last(stage))
    there = two(tmp_path, *longer, *ZERO[stage], last("one"))
    on_ranks(train_all, [stay, back], world=1)
    on_ranks(train_all, [there])
    assert len(losses(stay)) >= 4
    assert losses(back) == pytest.approx(losses(stay), rel=1e-4)
    assert losses(there) == pytest.approx(losses(stay), rel=1e-4)


DEEP = ("model=deep_mlp", "model.net.width=16", "model.net.depth=4", "optimizer.lr=0.01")
NETS = {
    "adamw": ("optimizer=adamw", "optimizer.lr=0.01"),
    "resnet": ("model=resnet20", "model.net.width=4", "model.net.depth=8", "optimizer.lr=0.01"),
    "recomputed": (*DEEP, "trainer.activation_checkpointing=blocks"),
    "tied_weights": ("model=gpt_nano", "data=synthetic_tokens", "data.batch_size=8", "optimizer=adamw"),
}
FEW = ("trainer.limit_train_batches=6", "trainer.limit_val_batches=2", "trainer.limit_test_batches=2")


@pytest.mark.parametrize("name", NETS)
def test_other_optimizers_and_nets(tmp_path: Path, name: str) -> None:
    arguments = (*NETS[name], *(FEW if name in ("resnet", "tied_weights") else ()))
    common = [word for word in COMMON if not (word.startswith("model") and arguments[0].startswith("model="))]
    one = new_run(tmp_path, *common, *arguments)
    zero = [two(tmp_path, *common, *arguments, *strategy) for strategy in {**ZERO, **OFFLOAD}.values()]
    on_ranks(train_all, [one], world=1, timeout=200)
    on_ranks(train_all, zero, timeout=400)
    for cfg in zero:
        assert losses(cfg) == pytest.approx(losses(one), rel=1e-5)
        assert flat_state(saved(cfg)).keys() == flat_state(saved(one)).keys()
