"""A run on the device: checkpoints on other devices, interruption, measurements, memory."""

import csv
import gc
import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from support.gpu import CONVOLUTIONS, PIXELS, PLAIN, TOKENS, Acceptance, close
from support.interruptions import kill_when, same
from support.runs import runs, weights

from lathe.measure import PeakMemory
from lathe.measure.flops import peak_flops
from lathe.nets import recompute

CONSTANT = "scheduler=constant"  # a rate that does not depend on the run's length


def test_a_checkpoint_of_one_device_on_the_other(gpu: Acceptance, tmp_path: Any) -> None:
    """Written on either, it has the same metrics on both, and training resumes on the other."""
    for made in ("cpu", gpu.accelerator):
        run = gpu.train(*PLAIN, CONSTANT, accelerator=made)
        assert all(tensor.device.type == "cpu" for tensor in weights(run.dir).values())
        for asked in ("cpu", gpu.accelerator):
            output = tmp_path / f"{made}_{asked}.json"
            assert not gpu.script("evaluate", f"run={run.dir}", f"trainer.accelerator={asked}", f"output={output}")
            assert f'"test/loss": {run.result["test/loss"]:.3f}'[:-1] in output.read_text()
        other = "cpu" if made == gpu.accelerator else gpu.accelerator
        words = (*PLAIN, CONSTANT, f"ckpt_path={run.dir}", "ckpt_mode=trainer", "trainer.max_steps=8")
        alone = gpu.reference(*PLAIN, CONSTANT, "trainer.max_steps=8")
        close(gpu.curve(*words, accelerator=other), alone[4:], 1e-4)


def test_a_kill_changes_nothing_under_deterministic(gpu: Acceptance) -> None:
    """Bit for bit, as trainer.deterministic=true promises: convolutions, augmentation, dropout, EMA."""
    words = [
        *(word for word in gpu.words(*CONVOLUTIONS) if not word.startswith("paths.")),
        "trainer.deterministic=true",
        "trainer.max_steps=40",
        "data.source.train_size=320",
        "data.augment.crop=1",
        "data.augment.flip=random",
        "callbacks=[default,ema]",
        "callbacks.checkpoint.every_n_train_steps=3",
        "callbacks.throughput=null",
    ]
    alone, killed = gpu.folder / "alone", gpu.folder / "killed"
    gpu.command(*words, f"paths.log_dir={alone}")
    run = kill_when(killed, 8, *words, f"paths.log_dir={killed}")
    gpu.command(f"resume={run}")
    same(runs(alone)[0], run)


def test_device_stats(gpu: Acceptance) -> None:
    run = gpu.train(*PLAIN, "callbacks=[default,device_stats]", "callbacks.device_stats.cpu_stats=null")
    with open(run.dir / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    name = "device/allocated_bytes" if gpu.real else "device/memory_percent"
    assert any(float(row[name] or 0) > 0 for row in rows)


def test_mfu(gpu: Acceptance, record_property: Any) -> None:
    """FLOP/s over a given peak; over the data sheet's if the GPU is in the table."""
    small = ("callbacks.throughput.skip_steps=2", "trainer.max_steps=8", "data.source.train_size=128")
    run = gpu.train(*PLAIN, *small, "callbacks.throughput.peak_flops=1e15")
    assert 0 < run.result["mfu"] < 1
    if gpu.real:
        record_property("peak, TFLOP/s of bfloat16", (peak_flops(gpu.device, torch.bfloat16) or math.nan) / 1e12)


class Peak(Callback):
    """Records the peak memory of a step."""

    def __init__(self, device: torch.device) -> None:
        self.memory, self.most = PeakMemory(device), 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gc.collect()  # the previous run's leftovers
        self.memory.__enter__()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.most = self.memory.peak
        self.memory.__exit__(None, None, None)


# Activations of 0.25 MB, more than a GPU's libraries take for themselves.
DEEP = (
    "model=deep_mlp",
    "model.net.width=64",
    "model.net.depth=24",
    *PIXELS,
    "data.batch_size=1024",
    "data.source.train_size=4096",
)


def test_recomputed_activations_take_less_memory(gpu: Acceptance, record_property: Any) -> None:
    found = {}
    for how in ("none", "blocks"):
        watch = Peak(gpu.device)
        words = (*DEEP, "optimizer=sgd", "optimizer.lr=0.01", f"trainer.activation_checkpointing={how}")
        close(gpu.curve(*words, watch=watch), gpu.reference(*DEEP, "optimizer=sgd", "optimizer.lr=0.01"), 1e-4)
        found[how] = watch.most
        record_property(f"peak, {how}", watch.most)
    assert 0 < found["blocks"] < found["none"]


def test_offloaded_activations_take_less_memory(
    gpu: Acceptance, record_property: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not gpu.real:
        monkeypatch.setattr(recompute, "AWAY", {"cpu"})  # its memory is the host's: the peak does not shrink
    words = (*DEEP, "optimizer=sgd", "optimizer.lr=0.01")
    found = {}
    for how in ("none", "offload"):
        watch = Peak(gpu.device)
        close(gpu.curve(*words, f"trainer.activation_checkpointing={how}", watch=watch), gpu.reference(*words), 1e-4)
        found[how] = watch.most
        record_property(f"peak, {how}", watch.most)
    assert not gpu.real or 0 < found["offload"] < found["none"]


@pytest.mark.stand_in("precision=bf16-mixed")
@pytest.mark.parametrize("words", ["strategy=fsdp", "precision=bf16-mixed"])
def test_offloaded_activations_with_others(gpu: Acceptance, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not gpu.real:
        monkeypatch.setattr(recompute, "AWAY", {"cpu"})
    found = [
        gpu.curve(*PLAIN, words, "trainer.deterministic=true", f"trainer.activation_checkpointing={how}")
        for how in ("none", "offload")
    ]
    assert found[0] == found[1]


class Optimizer(Callback):
    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.devices: set[str] = set()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        self.options = dict(optimizer.param_groups[0])
        self.devices = {p.device.type for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.stand_in("fused-adamw")
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("how", ["fused", "foreach"])
def test_optimizers_in_one_kernel(gpu: Acceptance, kind: str, how: str) -> None:
    watch = Optimizer()
    words = (*PLAIN, f"optimizer={kind}", "optimizer.lr=0.01")
    close(gpu.curve(*words, f"+optimizer.{how}=true", watch=watch), gpu.reference(*words), 1e-4)
    assert watch.options[how] is True
    assert watch.devices == {gpu.device.type}


@pytest.mark.stand_in("lamb")
@pytest.mark.parametrize("kind", ["muon", "lamb", "lars", "radam"])
def test_optimizers(gpu: Acceptance, kind: str) -> None:
    words = (*CONVOLUTIONS, f"optimizer={kind}", "optimizer.lr=0.01")
    close(gpu.curve(*words), gpu.reference(*words), 1e-2)


def test_several_steps_at_once_and_one_by_one(gpu: Acceptance) -> None:
    words = (*PLAIN, "trainer.max_steps=12", "trainer.log_every_n_steps=4")
    found = [gpu.curve(*words, f"trainer.steps_per_call={many}") for many in ("auto", "1")]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    close(found[0], gpu.reference(*words), 1e-4)


def test_attention(gpu: Acceptance) -> None:
    """Attention kernels that only a GPU has, in a supported format."""
    words = (*TOKENS, "optimizer=sgd", "optimizer.lr=0.05")
    close(gpu.curve(*words, "precision=bf16-mixed"), gpu.reference(*words), 2e-2)
