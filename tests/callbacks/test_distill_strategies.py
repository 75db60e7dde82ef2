"""Distillation under sharding strategies: the losses of one process, and refused connectors."""

from pathlib import Path
from typing import Any

import pytest
from support.ranks import on_ranks
from support.runs import column, new_run

import lathe.training.train

TRAIN = (
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "callbacks.throughput=null",
    "trainer.log_every_n_steps=1",
    "compression.receipt=none",
    "data.batch_size=32",
    "model=mlp",
    "model.net.width=16",
    "model.net.depth=3",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=4",
    "test=false",
    "optimizer.lr=0.05",
)


def _cases(rank: int, cfgs: list[dict[str, Any]]) -> list[str | None]:
    said: list[str | None] = []
    for cfg in cfgs:
        try:
            lathe.training.train.train(cfg)
            said.append(None)
        except lathe.errors.UserError as error:
            said.append(str(error))
    return said


METHODS = {
    "kd": (),
    "ema": ("compression.distill.teacher=ema", "compression.distill.ema_decay=0.5"),
    "rkd": ("compression.distill.method=rkd",),
    "fitnets": ("compression.distill.method=fitnets",),
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "tensor", "deepspeed_3"])
def test_spread_nets_are_taught_as_whole_ones(tmp_path: Path, strategy: str) -> None:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    teacher = new_run(tmp_path / "teacher", *TRAIN, "model.net.width=32", "trainer.limit_train_batches=40")
    lathe.training.train.train(teacher)
    run_dir = teacher["paths"]["run_dir"]
    distilled = ("compression=distill", f"compression.distill.teacher={run_dir}")
    many = (f"strategy={strategy}", "trainer.devices=2")
    cfgs = [new_run(tmp_path / name, *TRAIN, *many, *distilled, *settings) for name, settings in METHODS.items()]
    said = dict(zip(METHODS, on_ranks(_cases, cfgs, timeout=300)[0], strict=True))
    for cfg, (name, settings) in zip(cfgs, METHODS.items(), strict=True):
        if said[name] is not None:
            continue
        alone = new_run(tmp_path / f"{name}-alone", *TRAIN, *distilled, *settings)
        lathe.training.train.train(alone)
        if name != "rkd":  # compares samples within one process's batch
            ours, theirs = (column(Path(each["paths"]["run_dir"]), "train/soft_loss") for each in (alone, cfg))
            assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-6), name
    assert said["kd"] is None
    if strategy == "tensor":
        assert said["rkd"] is not None
        assert "which rkd can't compare" in said["rkd"]
    else:
        assert said["rkd"] is None
    assert said["fitnets"] is not None
    assert "trains connectors" in said["fitnets"]
    assert (said["ema"] is None) == (strategy != "deepspeed_3")
