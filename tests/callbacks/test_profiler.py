"""A trace that can be opened, a table whose parts add up, and an error for a run that is too short."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from lathe.callbacks.profiler import TorchProfiler
from lathe.errors import UserError


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


def test_a_run_that_ends_while_recording_still_writes(tiny: SimpleNamespace, tmp_path: Path) -> None:
    profiler = TorchProfiler(str(tmp_path), wait=1, warmup=1, active=50)
    tiny.trainer(profiler, max_epochs=1).fit(tiny.Task(), tiny.Loader())
    assert profiler.trace is not None
    assert profiler.trace.exists()


def test_a_run_that_is_too_short_is_an_error(tiny: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"6 steps and recording begins after callbacks\.profiler\.wait=20"):
        tiny.trainer(TorchProfiler(str(tmp_path), wait=20), max_epochs=1).fit(tiny.Task(), tiny.Loader())
    assert list(tmp_path.iterdir()) == []
