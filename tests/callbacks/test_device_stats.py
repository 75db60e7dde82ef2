"""Load and energy of the device; GPUs by a fake library."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.nvml import FakeNvml, install
from support.runs import SMALL, column, new_run

import lathe.training.train
from lathe.callbacks import DeviceStats
from lathe.callbacks.profiler import TorchProfiler
from lathe.errors import UserError

ON_CPU = "callbacks.device_stats: training is on a CPU, so it logs the machine's load and memory (psutil).\n"
CPUS = {"device/cpu_percent", "device/memory_percent", "device/resident_bytes"}


@pytest.fixture
def no_rapl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.callbacks.device_stats.Rapl", lambda: SimpleNamespace(readable=False))


class Counter(SimpleNamespace):
    """A machine whose processors take 5 J between two readings."""

    readable = True

    def joules(self) -> float:
        self.total = getattr(self, "total", 0.0) + 5.0
        return self.total


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU of NVML, and a Trainer that claims to train on it."""
    values = {"percent": 87, "memory": 2**31, "celsius": 64, "milliwatts": 250000, "millijoules": 4000}
    install(monkeypatch, FakeNvml(board=values), "board")
    monkeypatch.setattr("lathe.callbacks.device_stats.gpus_of", lambda trainer: [torch.device("cuda", 0)])
    return values


@pytest.mark.usefixtures("no_rapl")
def test_a_cpu_is_measured_at_every_logged_step(tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    stats, logger = DeviceStats(), tiny.Logger()
    tiny.trainer(stats, logger=logger, accumulate_grad_batches=2, max_epochs=4).fit(tiny.Task(), tiny.Loader())
    rows = [(step, row) for step, row in logger.rows if set(row) & CPUS]
    assert [step for step, _ in rows] == [2, 4, 6, 8, 10, 12]  # optimizer steps, each once
    assert all(set(row) == CPUS for _, row in rows)
    assert all(0 <= row["device/memory_percent"] <= 100 for _, row in rows)
    assert all(2**20 < row["device/resident_bytes"] < 2**40 for _, row in rows)
    assert stats.summary() == {}
    assert capsys.readouterr().out.count(ON_CPU) == 1


@pytest.mark.usefixtures("no_rapl")
def test_a_gpu_is_measured_by_nvml(tiny: SimpleNamespace, board: dict[str, Any]) -> None:
    class Burns(tiny.Task):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            board["millijoules"] += 1000
            return super().training_step(batch, batch_idx)

    stats, logger = DeviceStats(), tiny.Logger()
    tiny.trainer(stats, logger=logger, max_epochs=1).fit(Burns(), tiny.Loader())
    row = {"gpu_percent": 87.0, "gpu_memory_bytes": 2.0**31, "gpu_celsius": 64.0, "gpu_watts": 250.0}
    assert logger.rows[0] == (2, {f"device/{name}": value for name, value in row.items()})
    assert stats.summary() == {"energy_gpu_j": 6.0}  # a joule for each of six batches


@pytest.mark.usefixtures("no_rapl")
def test_the_energy_of_a_continued_run_is_that_of_both_processes(tiny: SimpleNamespace, board: dict[str, Any]) -> None:
    first = DeviceStats()
    trainer = tiny.trainer(first, max_epochs=1)
    trainer.fit(tiny.Task(), tiny.Loader())
    board["millijoules"] += 9000  # by another job, after the last reading
    assert first.state_dict() == {"joules": {"gpu": 0.0}}
    again = DeviceStats()
    again.load_state_dict({"joules": {"gpu": 4.5, "cpu": 1.0}})
    tiny.trainer(again, max_epochs=1).fit(tiny.Task(), tiny.Loader())
    assert again.summary() == {"energy_cpu_j": 1.0, "energy_gpu_j": 4.5}


def test_a_run_has_it_in_its_result_and_still_makes_several_steps_at_once(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    monkeypatch.setattr("lathe.callbacks.device_stats.Rapl", Counter)
    on_batch = DeviceStats.on_train_batch_end
    monkeypatch.setattr(DeviceStats, "on_train_batch_end", lambda *args: (seen.append(1), on_batch(*args))[1])
    cfg = new_run(tmp_path, *SMALL, "test=false", "callbacks=[default,device_stats]")
    result, run = lathe.training.train.train(cfg), Path(cfg["paths"]["run_dir"])
    assert len(column(run, "device/cpu_percent")) == 8  # of 40 steps, every fifth is logged
    assert 8 <= len(seen) < 40 * 0.6
    assert result["energy_cpu_j"] > 0
    assert result["energy_cpu_j"] % 5 == 0


def test_trace_and_table(tiny: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiler = TorchProfiler(str(tmp_path / "traces"), wait=1, warmup=1, active=3, top_k=4)
    tiny.trainer(profiler).fit(tiny.Task(), tiny.Loader())
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace == profiler.trace
    assert trace.name == "rank0.5.pt.trace.json"
    events = json.loads(trace.read_text())["traceEvents"]
    # Three training steps of a net with two linear layers.
    assert sum(e.get("name") == "aten::linear" and e.get("ph") == "X" for e in events) == 2 * 3
    out = capsys.readouterr().out
    assert "CPU self time of 3 training steps" in out
    assert "operator" in out
    assert out.count("%") == 4
    assert "ProfilerStep" not in out


def test_a_run_that_ends_while_recording_still_writes_or_fails_if_nothing_was_recorded(
    tiny: SimpleNamespace, tmp_path: Path
) -> None:
    for wait, files in ((20, 0), (1, 1)):
        profiler = TorchProfiler(str(tmp_path), wait=wait, warmup=1, active=50)
        short = pytest.raises(UserError, match=r"6 steps and recording begins after callbacks\.profiler\.wait=20")
        with nullcontext() if files else short:
            tiny.trainer(profiler, max_epochs=1).fit(tiny.Task(), tiny.Loader())
        assert len(list(tmp_path.iterdir())) == files
