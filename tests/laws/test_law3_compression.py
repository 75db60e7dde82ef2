"""Law 3 for compression: masks, observers, structure and schedules are bit-equal after a death."""

from pathlib import Path

import pytest
import torch
from support.commands import check, run
from support.interruptions import Interruption, compare, interruption, kill_when, same
from support.runs import QUIET, runs, weights

__all__ = ["interruption"]  # a fixture

RESNET = ("model=resnet20", "model.net.width=4", "model.net.depth=8")
SHORT = (
    *(*RESNET, *QUIET, "trainer.max_epochs=2", "data.batch_size=100", "trainer.log_every_n_steps=1"),
    *("callbacks.checkpoint.every_n_train_steps=3", "callbacks.throughput=null", "compression.receipt=none"),
)
# 1300 samples, 13 batches of 100 in each of 2 epochs
METHODS = {
    "prune": ("compression=prune", "compression.prune.every_n_steps=2"),
    "prune_structured": ("compression=prune_structured",),
    "prune_nm": ("compression=prune_nm", "callbacks=[default,ema]"),
    "lottery": ("compression=lottery",),
    "rigl": ("compression=rigl", "compression.rigl.every_n_steps=5"),
    "channels": ("compression=prune_channels", "compression.prune_channels.min_channels=1"),
    "qat": ("compression=qat", "precision=bf16-mixed"),
    "lsq": ("compression=qat", "compression.qat.lsq=true"),
    "stacked": ("compression=[distill,prune,qat]", "compression.distill.teacher=ema"),
    "stages": ("compression=[prune,qat]", "compression.stages=[prune,qat]"),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_deaths_change_nothing(tmp_path: Path, interruption: Interruption, method: str) -> None:
    deaths = [("on_train_batch_start", step) for step in (7, 20)]
    compare(tmp_path, interruption, deaths, *SHORT, *METHODS[method])


def test_a_pruned_and_quantized_run_after_a_death(tmp_path: Path, interruption: Interruption) -> None:
    words = (*SHORT, "compression=[prune,qat]", "compression.prune.sparsity=0.5")
    best = weights(compare(tmp_path, interruption, [("on_train_batch_start", 20)], *words), "best")
    convolutions = [value for name, value in best.items() if name.endswith(("conv1.weight", "conv2.weight"))]
    zeros = sum(int((value == 0).sum()) for value in convolutions)
    assert zeros > 0.3 * sum(value.numel() for value in convolutions), "no masks: the comparison shows nothing"
    assert any("quantizer" in name for name in best)


@pytest.mark.slow
def test_kill_9_on_two_processes(tmp_path: Path) -> None:
    overrides = (*SHORT, *METHODS["stacked"], "strategy=ddp", "trainer.devices=2", "trainer.max_epochs=3")
    check(run(*overrides, f"paths.log_dir={tmp_path / 'alone'}", cwd=tmp_path))
    (alone,) = runs(tmp_path / "alone")
    directory = kill_when(tmp_path / "killed", 30, *overrides, f"paths.log_dir={tmp_path / 'killed'}")
    check(run(f"resume={directory}", cwd=tmp_path))
    same(alone, directory)
    assert all(torch.isfinite(value).all() for value in weights(directory, "best").values())
