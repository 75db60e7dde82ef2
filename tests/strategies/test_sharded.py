"""Law 3 for sharded strategies: a killed and resumed run ends with the same weights, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.interruptions import QUICK, Interruption, train_through
from support.ranks import on_ranks
from support.runs import new_run, rows

import lathe.training.train
from lathe.runs.checkpoints import read_checkpoint

pytestmark = pytest.mark.law3

TRAIN = (
    *(*QUICK, "model.net.depth=2", "model.net.dropout=0.2", "data.batch_size=64", "optimizer=adamw"),
    *("trainer.devices=2", "trainer.max_epochs=2", "trainer.limit_train_batches=4", "trainer.limit_val_batches=1"),
    *("trainer.gradient_clip_val=0.5", "callbacks.checkpoint.every_n_train_steps=2"),
)
STRATEGIES = ("strategy=fsdp strategy.checkpoint=sharded", "strategy=tensor")


def train_with_a_death(rank: int, configs: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    interruption, make = Interruption(), lathe.training.train.make_callbacks
    lathe.training.train.make_callbacks = lambda cfg, task: [*make(cfg, task), interruption]
    for whole, cut in configs:
        train_through(whole, [], interruption)
        train_through(cut, [("on_train_batch_start", 7)], interruption)  # in the second epoch, after a checkpoint
        assert interruption.hook == ""


def test_a_death_within_an_epoch_changes_nothing(tmp_path: Path) -> None:
    configs = [
        tuple(new_run(tmp_path / f"{number}_{name}", *TRAIN, *words.split()) for name in ("whole", "cut"))
        for number, words in enumerate(STRATEGIES)
    ]
    on_ranks(train_with_a_death, configs, timeout=200)
    for pair in configs:
        one, two = (Path(cfg["paths"]["run_dir"]) for cfg in pair)
        assert [row["step"] for row in rows(two)] == [row["step"] for row in rows(one)]
        for name in ("best", "last"):
            ours, theirs = (read_checkpoint(folder / "checkpoints" / f"{name}.ckpt") for folder in (two, one))
            assert ours["global_step"] == theirs["global_step"]
            assert ours["state_dict"].keys() == theirs["state_dict"].keys()
            assert all(torch.equal(ours["state_dict"][key], value) for key, value in theirs["state_dict"].items())
        assert ours["global_step"] == 8


class Modes(Callback):
    """Records if evaluation runs in inference mode, in which tensors have no versions."""

    def __init__(self) -> None:
        self.found: set[bool] = set()

    def on_validation_batch_start(self, *_: Any) -> None:
        self.found.add(torch.is_inference_mode_enabled())

    on_test_batch_start = on_validation_batch_start


@pytest.mark.parametrize("words", ["fsdp strategy.cpu_offload=true", "tensor", "auto"])
def test_what_is_gathered_is_no_tensor_of_inference(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under NCCL: with gloo Lightning disables inference mode itself."""
    monkeypatch.setattr("lightning.pytorch.loops.utilities._distributed_is_initialized", lambda: False)
    make, modes = lathe.training.train.make_callbacks, Modes()
    monkeypatch.setattr(lathe.training.train, "make_callbacks", lambda cfg, task: [*make(cfg, task), modes])
    whole = (*TRAIN, "trainer.devices=1", "test=true", "trainer.limit_test_batches=1", "trainer.max_epochs=1")
    before = torch.distributed.is_initialized()
    try:
        lathe.training.train.train(new_run(tmp_path, *whole, *f"strategy={words}".split()))
    finally:
        if not before and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # of this one process, which later tests would take for several
    assert (True in modes.found) is (words == "auto")
