"""Jobs in this process or in real workers under torch's elastic agent; what a worker meets arrives as one sentence."""

import gc
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.processes import server
from torch.distributed.launcher import api as launcher
from torch.distributed.launcher.api import LaunchConfig

from lathe.errors import Stopped, UserError
from lathe.launch.elastic import call_job, run_job
from lathe.launch.error_reporting import FULL_ERROR


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FULL_ERROR, raising=False)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")  # taken back after the test
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers from the server of support/processes.py, which has imported torch: who tests what the agent makes of
    their end needs no more. Their output is not captured. Other tests start fresh processes, as users' commands do."""
    server()
    monkeypatch.setattr(launcher, "LaunchConfig", lambda **of: LaunchConfig(**{**of, "start_method": "forkserver"}))


@pytest.fixture
def cfg(tmp_path: Path) -> dict[str, Any]:
    return {
        "folder": str(tmp_path),
        "paths": {"run_dir": "logs/x"},
        "trainer": {"accelerator": "cpu", "devices": 1, "num_nodes": 1},
    }


def options(restarts: int = 0, **others: Any) -> dict[str, Any]:
    return {
        "max_restarts": restarts,
        "monitor_interval": 0.05,
        "timeout": 60.0,
        "nodes": 1,
        "endpoint": None,
        "id": None,
        "join_timeout": 60,
        "last_call_timeout": 1,
        "numa": "none",
        **others,
    }


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("works", [True, False])
def test_garbage_collection_is_off_while_a_job_is_imported(
    enabled: bool, works: bool, cfg: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"job_{enabled}_{works}"
    (tmp_path / f"{name}.py").write_text(
        f"import gc\nseen = gc.isenabled()\n1 / {works:d}\ndef job(cfg): return seen, gc.isenabled()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = gc.get_freeze_count()
    (gc.enable if enabled else gc.disable)()
    try:
        with nullcontext() if works else pytest.raises(ZeroDivisionError):
            assert call_job(f"{name}:job", {}) == (False, enabled)
        assert gc.isenabled() is enabled
        assert (gc.get_freeze_count() > before) is enabled
        call_job(
            "support.agent_jobs:describe", cfg
        )  # what is there is not imported again, and what it makes not frozen
        made = gc.get_freeze_count()
        call_job("support.agent_jobs:describe", cfg)
        assert gc.get_freeze_count() <= made
    finally:
        gc.enable()


def test_one_process_is_this_one(cfg: dict[str, Any]) -> None:
    result = run_job("support.agent_jobs:describe", cfg, 1, options())
    assert result["pid"] == os.getpid()
    assert result["cfg"] is cfg
    assert result["RANK"] == os.environ.get("RANK")


def test_a_mistake_in_this_process_passes_through(cfg: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^the same sentence\.$"):
        run_job("support.agent_jobs:mistake_everywhere", cfg, 1, options())


def test_call_finds_a_function_by_name() -> None:
    assert call_job("json:dumps", {"a": 1}) == '{"a": 1}'


def test_two_workers_get_the_configuration_and_rank_0_answers(cfg: dict[str, Any], tmp_path: Path) -> None:
    result = run_job("support.agent_jobs:describe", {**cfg, "nested": {"list": [1, None, 0.1]}}, 2, options())
    assert result["cfg"] == {**cfg, "nested": {"list": [1, None, 0.1]}}
    assert result["pid"] != os.getpid()
    assert (result["RANK"], result["LOCAL_RANK"], result["WORLD_SIZE"]) == ("0", "0", "2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]


@pytest.mark.usefixtures("forked")
def test_a_workers_mistake_arrives_at_once(cfg: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        run_job("support.agent_jobs:mistake", cfg, 2, options())  # the other worker would sleep for long
    assert str(caught.value) == "data.batch_size=7: a sentence with 'quotes'."


@pytest.mark.usefixtures("forked")
def test_a_mistake_is_not_tried_again(cfg: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^the same sentence\.$"):
        run_job("support.agent_jobs:mistake_everywhere", cfg, 1, options(restarts=2))
    assert (tmp_path / "rank0").read_text() == "x"


@pytest.mark.usefixtures("forked")
def test_a_stop_is_a_stop_and_not_tried_again(cfg: dict[str, Any]) -> None:
    with pytest.raises(Stopped) as caught:
        run_job("support.agent_jobs:stopped", cfg, 1, options(restarts=2))
    assert (caught.value.signal, caught.value.command, caught.value.code) == (
        "SIGUSR1",
        "python train.py resume=logs/x",
        138,
    )


@pytest.mark.usefixtures("forked")
def test_a_bug_in_a_worker_shows_where_it_was(cfg: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 failed.*'int' object has no attribute") as caught:
        run_job("support.agent_jobs:bug", {**cfg, "bug": 3}, 1, options(restarts=1))
    assert not isinstance(caught.value, UserError)
    assert "schema" in str(caught.value)


@pytest.mark.usefixtures("forked")
def test_an_error_of_the_users_code_is_tried_again_and_reported_with_its_line(cfg: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=r"(?s)^ConnectionError: no network\n  File \".*agent_jobs\.py\", line \d+, in lost\n"
    ):
        run_job("support.agent_jobs:lost", cfg, 1, options(restarts=1))
    assert Path(cfg["folder"], "tries").read_text() == "xx"


@pytest.mark.usefixtures("forked")
def test_a_killed_worker_is_one_sentence(cfg: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        run_job("support.agent_jobs:killed", {**cfg, "deaths": 9}, 2, options())
    assert str(caught.value) == (
        "rank 0 died (SIGKILL) and launch.max_restarts=0 leaves no restart: continue with resume=logs/x, or set "
        "launch.max_restarts."
    )


@pytest.mark.usefixtures("forked")
def test_a_killed_worker_is_started_again_with_the_other(cfg: dict[str, Any], tmp_path: Path) -> None:
    assert run_job("support.agent_jobs:killed", {**cfg, "deaths": 1}, 2, options(restarts=2)) == "start 2"
    assert (tmp_path / "starts").read_text() == "xx"


def test_a_restart_is_printed(cfg: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_job("support.agent_jobs:killed", {**cfg, "deaths": 1}, 1, options(restarts=2)) == "start 2"
    assert (tmp_path / "starts").read_text() == "xx"
    assert "A worker died: restart 1 of 2, from the last checkpoint." in capfd.readouterr().out


@pytest.mark.usefixtures("forked")
def test_restarts_are_counted(cfg: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^rank 0 died \(SIGKILL\) and launch\.max_restarts=1 leaves no restart"):
        run_job("support.agent_jobs:killed", {**cfg, "deaths": 9}, 1, options(restarts=1))
    assert (tmp_path / "starts").read_text() == "xx"


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_hangs_is_ended_with_who_waited_where(cfg: dict[str, Any], rank: int) -> None:
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        run_job("support.agent_jobs:hangs", {**cfg, "rank": rank, "hangs": 9}, 2, options(timeout=1.0))
    assert str(caught.value) == (
        f"rank {1 - rank} waited longer than launch.timeout=1 seconds in all_reduce (step 2): rank {rank} did not come "
        "(if it was only slow, raise launch.timeout), and launch.max_restarts=0 leaves no restart: continue with "
        "resume=logs/x, or set launch.max_restarts."
    )
    assert time.monotonic() - began < 60  # it would have slept for ten minutes


@pytest.mark.slow
def test_a_rank_that_hangs_is_started_again(
    cfg: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_job("support.agent_jobs:hangs", {**cfg, "rank": 1, "hangs": 1}, 2, options(restarts=2, timeout=1.0))
        == "4 steps"
    )
    assert (tmp_path / "starts").read_text() == "xx"
    told = (
        "rank 0 waited longer than launch.timeout=1 seconds in all_reduce (step 2): rank 1 did not come: restart 1 "
        "of 2, from the last"
    )
    assert told in capfd.readouterr().out


@pytest.mark.parametrize("code", [None, 0, False])
def test_a_component_that_exits_is_a_failure(code: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.training.train.train", lambda cfg: sys.exit(code))
    with pytest.raises(UserError, match=r"^The run ended early because a component called sys\.exit\(\)\. "):
        call_job("lathe.training.train:train", {})
    monkeypatch.setattr("lathe.training.train.train", lambda cfg: sys.exit(3))
    with pytest.raises(SystemExit, match="3"):
        call_job("lathe.training.train:train", {})
