"""Distillation under sharding strategies: the losses of one process, and refused connectors."""

from pathlib import Path
from typing import Any

import pytest
from support.ranks import on_ranks
from support.runs import QUIET, column, new_run

import lathe.training.train

TRAIN = (
    *(*QUIET, "callbacks.throughput=null", "trainer.log_every_n_steps=1", "compression.receipt=none", "test=false"),
    *("data.batch_size=32", "model=mlp", "model.net.width=16", "model.net.depth=3", "optimizer.lr=0.05"),
    *("trainer.max_epochs=1", "trainer.limit_train_batches=4"),
)
METHODS = {
    "kd": (),
    "ema": ("compression.distill.teacher=ema", "compression.distill.ema_decay=0.5"),
    "rkd": ("compression.distill.method=rkd",),
    "fitnets": ("compression.distill.method=fitnets",),
}


def _cases(rank: int, cfgs: list[dict[str, Any]]) -> list[str | None]:
    errors: list[str | None] = []
    for cfg in cfgs:
        try:
            lathe.training.train.train(cfg)
            errors.append(None)
        except lathe.errors.UserError as error:
            errors.append(str(error))
    return errors


def _config(folder: Path, teacher: Path, name: str, *words: str) -> dict[str, Any]:
    distilled = ("compression=distill", f"compression.distill.teacher={teacher}", *METHODS[name])
    return new_run(folder / name, *TRAIN, *distilled, *words)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """A teacher, and by method the losses of one process; rkd compares samples within one process's batch."""
    folder = tmp_path_factory.mktemp("alone")
    cfg = new_run(folder / "teacher", *TRAIN, "model.net.width=32", "trainer.limit_train_batches=40")
    lathe.training.train.train(cfg)
    teacher, losses = Path(cfg["paths"]["run_dir"]), {}
    for name in ("kd", "ema"):
        cfg = _config(folder, teacher, name)
        lathe.training.train.train(cfg)
        losses[name] = column(Path(cfg["paths"]["run_dir"]), "train/soft_loss")
    return teacher, losses


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "tensor", "deepspeed_3"])
def test_spread_nets_are_taught_as_whole_ones(
    tmp_path: Path, alone: tuple[Path, dict[str, list[float]]], strategy: str
) -> None:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    teacher, losses = alone
    two = (f"strategy={strategy}", "trainer.devices=2")
    cfgs = {name: _config(tmp_path, teacher, name, *two) for name in METHODS}
    errors = dict(zip(METHODS, on_ranks(_cases, list(cfgs.values()), timeout=300)[0], strict=True))
    for name, expected in losses.items():
        if errors[name] is None:
            soft = column(Path(cfgs[name]["paths"]["run_dir"]), "train/soft_loss")
            assert soft == pytest.approx(expected, rel=1e-4, abs=1e-6), name
    assert errors["kd"] is None
    assert (errors["ema"] is None) == (strategy != "deepspeed_3")
    assert "trains connectors" in str(errors["fitnets"])
    assert errors["rkd"] is None if strategy != "tensor" else "which rkd can't compare" in str(errors["rkd"])
