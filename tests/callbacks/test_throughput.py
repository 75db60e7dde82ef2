"""Metrics of a run with known times; pauses are excluded."""

import platform
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from support.ranks import on_ranks
from support.tiny import MemoryLogger, TinyLoader, TinyTask, make_trainer
from torch import Tensor, nn

from lathe.callbacks.throughput import Throughput
from lathe.measure.processes import peak_resident

NAMES = {
    *("samples_per_s", "step_ms", "data_wait", "grad_sync", "mfu", "epoch_s", "peak_gpu_bytes", "peak_resident_bytes"),
    *("rank_ms_min", "rank_ms_max", "slowest_rank"),
}


class Clock:
    """Time passes only in `sleep`, so that metrics are exact on a busy machine."""

    def __init__(self) -> None:
        self.now = 1.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("lathe.callbacks.throughput.perf_counter", lambda: clock.now)
    return clock


def slow_task(tiny: SimpleNamespace, clock: Clock) -> Any:
    class Slow(tiny.Task):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            clock.sleep(0.03)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            clock.sleep(0.3)

    return Slow()


def slow_loader(tiny: SimpleNamespace, clock: Clock) -> Any:
    class SlowLoader(tiny.Loader):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                clock.sleep(0.01)
                yield batch

    return SlowLoader()


def test_figures_of_a_run_whose_times_are_known(tiny: SimpleNamespace, clock: Clock, tmp_path: Any) -> None:
    throughput, logger, before = Throughput(skip_steps=2), tiny.Logger(), peak_resident()

    def save(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            trainer.save_checkpoint(tmp_path / "x.ckpt")
            clock.sleep(0.3)

    saves = LambdaCallback(on_train_batch_end=save)
    tiny.trainer(throughput, saves, logger=logger, max_epochs=3).fit(slow_task(tiny, clock), slow_loader(tiny, clock))
    summary = throughput.summary()
    assert summary.keys() == NAMES
    # 10 ms for the loader and 30 ms for the step; validation and checkpoint, of 300 ms each, are excluded.
    # An epoch is six batches of 40 ms, the run's first ones too.
    expected = {"step_ms": 40, "samples_per_s": 8 / 0.040, "data_wait": 0.25, "epoch_s": 0.24}
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
    assert {summary[name] for name in ("grad_sync", "mfu", "slowest_rank", "peak_gpu_bytes")} == {None}
    epochs = [(step, row["throughput/epoch_s"]) for step, row in logger.rows if "throughput/epoch_s" in row]
    assert epochs == [(step, pytest.approx(0.24)) for step in (6, 12, 18)]
    assert 2**20 < before <= summary["peak_resident_bytes"] <= peak_resident()
    rows = [(step, row) for step, row in logger.rows if "throughput/step_ms" in row]
    # 18 batches, the first 2 not measured, windows of trainer.log_every_n_steps=2, counted in optimizer steps.
    assert [step for step, _ in rows] == [4, 6, 8, 10, 12, 14, 16, 18]
    logged = {"throughput/samples_per_s", "throughput/step_ms", "throughput/data_wait"}
    assert all(row.keys() == logged for _, row in rows)


def test_measuring_does_not_change_the_run(tiny: SimpleNamespace) -> None:
    def run(*callbacks: Any) -> list[Tensor]:
        torch.manual_seed(6)
        task = tiny.Task(nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
        torch.manual_seed(7)
        trainer = tiny.trainer(*callbacks)
        trainer.fit(task, tiny.Loader())
        assert "_on_before_fetch" not in vars(trainer.fit_loop.epoch_loop)
        return list(task.net.state_dict().values())

    for a, b in zip(run(), run(Throughput(peak_flops=1e12)), strict=True):
        assert torch.equal(a, b)


def test_an_epoch_that_was_interrupted_has_its_whole_time(tiny: SimpleNamespace, clock: Clock, tmp_path: Any) -> None:

    class Dies(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 9:
                trainer.save_checkpoint(tmp_path / "x.ckpt")
                raise KeyError

    def fit(throughput: Throughput, *callbacks: Any, ckpt_path: Any = None) -> list[tuple[int | None, float]]:
        logger = tiny.Logger()
        trainer = tiny.trainer(throughput, *callbacks, logger=logger, max_epochs=3)
        task, loader = slow_task(tiny, clock), slow_loader(tiny, clock)
        with pytest.raises(KeyError) if callbacks else nullcontext():
            trainer.fit(task, loader, ckpt_path=ckpt_path)
        return [(at, row["throughput/epoch_s"]) for at, row in logger.rows if "throughput/epoch_s" in row]

    assert fit(Throughput(), Dies()) == [(6, pytest.approx(0.24))]
    clock.sleep(100)
    throughput = Throughput()
    assert fit(throughput, ckpt_path=tmp_path / "x.ckpt") == [(at, pytest.approx(0.24)) for at in (12, 18)]
    assert throughput._epochs.whole == pytest.approx([0.24] * 3)


class Late(Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.04)


def on_a_rank(rank: int, late: int) -> tuple[Any, list[Any]]:
    throughput, logger, callbacks = Throughput(window=2, skip_steps=2), MemoryLogger(), [Late()] if rank == late else []
    options: dict[str, Any] = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False, "logger": logger}
    make_trainer(throughput, *callbacks, **options).fit(TinyTask(nn.Linear(3, 2)), TinyLoader())
    rows = [(step, row) for step, row in logger.rows if any(name.startswith("throughput/") for name in row)]
    return throughput.summary(), rows


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_the_slowest_of_two_processes_is_named(late: int) -> None:
    """By each rank's own work: under DDP all steps have the same length."""
    (summary, rows), (_, others) = on_ranks(on_a_rank, late)
    assert others == []
    assert summary["slowest_rank"] == f"{platform.node()}:{late}"
    assert 40 <= summary["rank_ms_max"] < 2 * summary["step_ms"]
    assert summary["rank_ms_min"] < summary["rank_ms_max"] / 2
    assert summary["step_ms"] >= 40
    assert 8 / summary["step_ms"] * 1e3 < summary["samples_per_s"] <= 16 / 0.040  # both processes are counted
    assert (summary["grad_sync"] > 0.5) == (late == 1)  # rank 0 waits for the late one
    epochs = [(step, row) for step, row in rows if "throughput/epoch_s" in row]
    assert [step for step, _ in epochs] == [6, 12]
    assert [row["throughput/slowest_rank"] for _, row in epochs] == [late, late]
    assert all(row["throughput/rank_ms_max"] >= 40 for _, row in epochs)


def test_an_incomplete_epoch_has_no_time(tiny: SimpleNamespace, clock: Clock) -> None:
    throughput = Throughput()
    tiny.trainer(throughput, max_steps=4).fit(slow_task(tiny, clock), slow_loader(tiny, clock))
    assert throughput.summary()["epoch_s"] is None
    state = throughput.state_dict()
    assert set(state.pop("summary").values()) == {None}  # no window either
    assert state == {"seconds": pytest.approx(0.16), "whole": []}
