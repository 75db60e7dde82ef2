"""torchrun, srun and horovodrun are recognised by environment; all ranks use rank 0's configuration."""

import os
import socket
from email.message import Message
from io import BytesIO
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request

import pytest
import torch
from support.ranks import on_ranks

from lathe.errors import UserError
from lathe.launch.external_launch import ExternalLaunch, detect_external_launch

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job7",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_JOB_ID": "99",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NODELIST": "node[3-4]",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS_PER_NODE": "2",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the launchers' variables: environment(RANK="0")."""
    names = [key for key in os.environ if key.startswith(("TORCHELASTIC", "SLURM", "HOROVOD"))]
    names += ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"]
    for key in (*names, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(key, "x")  # so that variables set by the code are restored after the test
        monkeypatch.delenv(key)

    def put(**values: str) -> None:
        for key, value in values.items():
            monkeypatch.setenv(key, value)

    return put


def test_torchrun(environment: Any) -> None:
    environment(**TORCHRUN)
    assert detect_external_launch() == ExternalLaunch(
        "torchrun:job7", rank=3, local_rank=1, world_size=4, restarted=False
    )
    environment(TORCHELASTIC_RESTART_COUNT="2")
    assert detect_external_launch() == ExternalLaunch(
        "torchrun:job7", rank=3, local_rank=1, world_size=4, restarted=True
    )

    environment(TORCHELASTIC_RUN_ID="none")
    with pytest.raises(UserError, match="--rdzv-id"):  # several ranks need a name
        detect_external_launch()


def test_srun_and_where_its_ranks_meet(environment: Any) -> None:
    environment(**SLURM)
    assert detect_external_launch() == ExternalLaunch("slurm:99", rank=2, local_rank=0, world_size=4, restarted=False)
    assert os.environ["MASTER_ADDR"] == "node3"
    port = int(os.environ["MASTER_PORT"])
    assert 10000 <= port < 65536
    environment(SLURM_RESTART_COUNT="1")
    outer = detect_external_launch()
    assert outer is not None
    assert outer.restarted
    assert int(os.environ["MASTER_PORT"]) == port


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_NTASKS": "1"},
        {"SLURM_JOB_NAME": "bash"},
        {"SLURM_PROCID": "0"},  # a batch script, without srun
    ],
)
def test_a_command_typed_inside_an_allocation_is_a_run_by_hand(environment: Any, change: dict[str, str]) -> None:
    environment(**{**SLURM, **change})
    assert detect_external_launch() is None
    assert "MASTER_ADDR" not in os.environ


class Store:
    """The table of keys that horovodrun serves to its ranks over HTTP, in the place of urllib's opener."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}

    def open(self, request: Request, timeout: float) -> BytesIO:
        if isinstance(request.data, bytes):
            self.keys[request.full_url] = request.data
        elif request.full_url not in self.keys:
            raise HTTPError(request.full_url, 404, "", Message(), None)
        return BytesIO(self.keys[request.full_url])


@pytest.fixture
def horovodrun(environment: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace horovodrun on two machines and its variables: horovodrun(rank)."""
    store = Store()
    monkeypatch.setattr("urllib.request.build_opener", lambda *_: store)

    def put(rank: int) -> str:
        environment(
            HOROVOD_RANK=str(rank),
            HOROVOD_SIZE="4",
            HOROVOD_LOCAL_RANK=str(rank % 2),
            HOROVOD_LOCAL_SIZE="2",
            HOROVOD_CROSS_RANK=str(rank // 2),
            HOROVOD_HOSTNAME=f"host{rank // 2}",
            HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1",
            HOROVOD_GLOO_RENDEZVOUS_PORT="7",
        )
        return "127.0.0.1:7"

    return put


def test_horovodrun_and_where_its_ranks_meet(horovodrun: Any, environment: Any) -> None:
    environment(**{**SLURM, "SLURM_PROCID": "0"})  # a batch script inside an allocation: every rank has these
    address = horovodrun(0)
    assert detect_external_launch() == ExternalLaunch(
        f"horovodrun:{address}", rank=0, local_rank=0, world_size=4, restarted=False
    )
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    assert (host, port.isdigit()) == ("host0", True)
    for key in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        del os.environ[key]
    horovodrun(3)
    assert detect_external_launch() == ExternalLaunch(
        f"horovodrun:{address}", rank=3, local_rank=1, world_size=4, restarted=False
    )
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert [os.environ[name] for name in names] == [host, port, "3", "1", "4", "2", "1"]


TYPED = {"trainer": {"accelerator": "cpu", "devices": 2}, "launch": {"timeout": 30.0}}


def exchange(rank: int, port: int) -> dict[str, Any] | None:
    """Exchange configurations as two ranks that composed different ones."""
    outer = ExternalLaunch("torchrun:1", rank, rank, 2, False)
    torch.distributed.barrier()  # a rank that exits while the other still connects would close its connection
    torch.distributed.destroy_process_group()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(port)
    if rank == 0:
        mine = {"lr": 0.1, "list": [1, {"a": None}], "rank": 0, **TYPED}
        outer.broadcast(mine, mine)
        return mine
    return outer.broadcast({"lr": 0.2, **TYPED})


def test_rank_0s_configuration_reaches_all() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    first, second = on_ranks(exchange, port)
    assert first == second == {"lr": 0.1, "list": [1, {"a": None}], "rank": 0, **TYPED}
