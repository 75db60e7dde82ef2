"""The logged norm of the gradients, compared with a backward pass by hand and between devices."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from support.runs import SMALL, column, config

from lathe.callbacks import GradNorm
from lathe.errors import UserError
from lathe.runs import rundir
from lathe.training.train import train

OPTIONS = (*SMALL, "callbacks=[default,grad_norm]", "trainer.max_epochs=1", "trainer.limit_train_batches=8")


def _train_rank(rank: int, cfg: dict[str, Any]) -> None:
    train(cfg)


def _run(log_dir: Path, *overrides: str, devices: int = 1) -> Path:
    cfg = config(*OPTIONS, *overrides, f"paths.log_dir={log_dir}", f"trainer.devices={devices}")
    run = rundir.create(log_dir, cfg, []).path
    train(cfg) if devices == 1 else on_ranks(_train_rank, cfg, timeout=120)
    return run


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_norm_is_that_before_clipping(tiny: SimpleNamespace, accumulated: int) -> None:
    by_hand = tiny.Task()
    for batch in list(tiny.Loader())[:accumulated]:
        (by_hand.training_step(batch, 0)["loss"] / accumulated).backward()
    expected = {f"grad_norm/{name}": value.grad.norm() for name, value in by_hand.net.named_parameters()}
    expected["grad_norm/total"] = torch.stack(list(expected.values())).norm()

    logger = tiny.Logger()
    options = {"logger": logger, "accumulate_grad_batches": accumulated, "max_steps": 1, "log_every_n_steps": 1}
    trainer = tiny.trainer(GradNorm(per_parameter=True), gradient_clip_val=1e-3, **options)
    trainer.fit(tiny.Task(), tiny.Loader())
    logged = {name: value for _, row in logger.rows for name, value in row.items() if name.startswith("grad_norm/")}
    assert logged == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-6)


def test_the_callback_changes_no_step_and_logs_at_logged_steps(tmp_path: Path) -> None:
    run = _run(tmp_path / "with")
    without = _run(tmp_path / "without", "callbacks=default")
    assert len(column(run, "grad_norm/total")) == 1  # of 8 steps every fifth is logged
    weights = [torch.load(one / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for one in (run, without)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.law2
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_two_processes_log_the_norm_of_one(tmp_path: Path, strategy: str) -> None:
    often = ("trainer.log_every_n_steps=2", "model.net.depth=2", "trainer.gradient_clip_val=0.5")
    alone = column(_run(tmp_path / "alone", *often), "grad_norm/total")
    spread = column(_run(tmp_path / "spread", *often, f"strategy={strategy}", devices=2), "grad_norm/total")
    assert len(alone) == 4
    assert spread == pytest.approx(alone, rel=1e-4)


def _refusal(rank: int, cfg: dict[str, Any]) -> str:
    try:
        train(cfg)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [("deepspeed_2", "DeepSpeed keeps the gradients to itself"), ("pipeline", "each process has other layers")],
)
def test_strategies_that_hide_gradients_are_refused(tmp_path: Path, strategy: str, reason: str) -> None:
    more = ("model.net.depth=4", f"strategy={strategy}", "trainer.devices=2", f"paths.log_dir={tmp_path}")
    cfg = config(*OPTIONS, *more)
    rundir.create(tmp_path, cfg, [])
    for message in on_ranks(_refusal, cfg, timeout=120):
        assert message.startswith(f"callbacks.grad_norm: {reason}")
