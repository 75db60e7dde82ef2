"""torchrun and srun are recognised by what they leave in the environment, and rank 0's configuration is everybody's."""

import os
from typing import Any

import pytest
import torch
from ranks import on_ranks

from lathe.errors import UserError
from lathe.outer import Outer, detect_outer

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job7",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_PORT": "29400",
}
SLURM = {"SLURM_JOB_ID": "99", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_NODELIST": "node[3-4]",
         "SLURM_JOB_NAME": "train", "SLURM_NTASKS_PER_NODE": "2"}  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces the launchers' variables: environment(RANK="0")."""
    for key in list(os.environ):
        if key.startswith(("TORCHELASTIC", "SLURM")) or key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(key)
    for key in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(key, "x")  # so that what the code sets is taken back after the test
        monkeypatch.delenv(key)

    def put(**values: str) -> None:
        for key, value in values.items():
            monkeypatch.setenv(key, value)

    return put


def test_a_run_by_hand_has_no_outer_launcher() -> None:
    assert detect_outer() is None


def test_torchrun(environment: Any) -> None:
    environment(**TORCHRUN)
    assert detect_outer() == Outer("torchrun:job7", rank=3, local_rank=1, world_size=4, restarted=False)
    environment(TORCHELASTIC_RESTART_COUNT="2")
    assert detect_outer() == Outer("torchrun:job7", rank=3, local_rank=1, world_size=4, restarted=True)


def test_torchrun_without_a_name_is_known_by_its_agent_on_one_machine(environment: Any) -> None:
    environment(**{**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0"})
    outer = detect_outer()
    assert outer is not None
    assert outer.launch_id == f"torchrun:torchrun-{os.getppid()}-29400"


def test_torchrun_without_a_name_is_refused_on_several(environment: Any) -> None:
    environment(**{**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"})
    with pytest.raises(UserError, match="torchrun on several nodes needs --rdzv-id"):
        detect_outer()


def test_srun_and_where_its_ranks_meet(environment: Any) -> None:
    environment(**SLURM)
    assert detect_outer() == Outer("slurm:99", rank=2, local_rank=0, world_size=4, restarted=False)
    assert os.environ["MASTER_ADDR"] == "node3"
    port = int(os.environ["MASTER_PORT"])
    assert 10000 <= port < 65536
    environment(SLURM_RESTART_COUNT="1")
    outer = detect_outer()
    assert outer is not None
    assert outer.restarted
    assert int(os.environ["MASTER_PORT"]) == port


def test_srun_has_to_say_how_many_tasks_a_node_has(environment: Any) -> None:
    environment(**{key: value for key, value in SLURM.items() if key != "SLURM_NTASKS_PER_NODE"})
    with pytest.raises(UserError, match=r"^srun was given --ntasks alone: give --nodes and --ntasks-per-node in its place\.$"):
        detect_outer()


@pytest.mark.parametrize("change", [{"SLURM_NTASKS": "1"}, {"SLURM_JOB_NAME": "bash"}, {"SLURM_JOB_NAME": "interactive"}])
def test_a_command_typed_inside_an_allocation_is_a_run_by_hand(environment: Any, change: dict[str, str]) -> None:
    environment(**{**SLURM, **change})
    assert detect_outer() is None
    assert "MASTER_ADDR" not in os.environ


TYPED = {"trainer": {"accelerator": "cpu", "devices": 2}, "launch": {"timeout": 30.0}}


def exchange(rank: int) -> dict[str, Any]:
    """As two ranks that composed different configurations."""
    outer = Outer("torchrun:1", rank, rank, 2, False)
    torch.distributed.destroy_process_group()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", os.environ["TEST_PORT"]
    if rank == 0:
        mine = {"lr": 0.1, "list": [1, {"a": None}], "rank": 0, **TYPED}
        outer.send(mine)
        return mine
    return outer.receive({"lr": 0.2, **TYPED})


def test_rank_0s_configuration_reaches_all(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    first, second = on_ranks(exchange_at, port)
    assert first == second == {"lr": 0.1, "list": [1, {"a": None}], "rank": 0, **TYPED}


def exchange_at(rank: int, port: int) -> dict[str, Any]:
    os.environ["TEST_PORT"] = str(port)
    return exchange(rank)
