"""Jobs in this process or in workers of torch's elastic agent; errors are reported in one message."""

import os
from pathlib import Path
from typing import Any

import pytest
from support.processes import server
from torch.distributed.launcher import api as launcher
from torch.distributed.launcher.api import LaunchConfig

from lathe.errors import Stopped, UserError
from lathe.launch.elastic import run_job
from lathe.launch.error_reporting import FULL_ERROR


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FULL_ERROR, raising=False)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")  # restored after the test
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork workers from the server of support/processes.py, with torch imported and output not captured."""
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


def test_two_workers_get_the_configuration_and_rank_0_answers(cfg: dict[str, Any], tmp_path: Path) -> None:
    result = run_job("support.agent_jobs:describe", {**cfg, "nested": {"list": [1, None, 0.1]}}, 2, options())
    assert result["cfg"] == {**cfg, "nested": {"list": [1, None, 0.1]}}
    assert result["pid"] != os.getpid()
    assert (result["RANK"], result["LOCAL_RANK"], result["WORLD_SIZE"]) == ("0", "0", "2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]


@pytest.mark.usefixtures("forked")
def test_a_workers_mistake_arrives_at_once_and_is_not_tried_again(cfg: dict[str, Any], tmp_path: Path) -> None:
    for processes, restarts in ((2, 0), (1, 2)):  # the other of two workers would sleep for long
        with pytest.raises(UserError, match=r"^data\.batch_size=7: a sentence with 'quotes'\.$"):
            run_job("support.agent_jobs:mistake", cfg, processes, options(restarts))
    assert (tmp_path / "tries").read_text() == "xx"


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
    assert str(caught.value).startswith("rank 0 died (SIGKILL) and launch.max_restarts=0 leaves no restart")
    assert "resume=logs/x" in str(caught.value)


@pytest.mark.usefixtures("forked")
def test_a_killed_worker_is_started_again_with_the_other(cfg: dict[str, Any], tmp_path: Path) -> None:
    assert run_job("support.agent_jobs:killed", {**cfg, "deaths": 1}, 2, options(restarts=2)) == "start 2"
    assert (tmp_path / "starts").read_text() == "xx"


@pytest.mark.usefixtures("forked")
def test_a_rank_that_hangs_is_ended_with_who_waited_where(cfg: dict[str, Any]) -> None:
    """It would sleep for ten minutes."""
    waited = r"^rank 0 waited longer than launch\.timeout=1 seconds in all_reduce \(step 2\): rank 1 did not come"
    with pytest.raises(UserError, match=waited):
        run_job("support.agent_jobs:hangs", {**cfg, "rank": 1, "hangs": 9}, 2, options(timeout=1.0))
