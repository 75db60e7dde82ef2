"""The collective timeout applies to every group, and a rank that times out reports its position."""

import os
import socket
import time
from pathlib import Path

import pytest
import torch
from support.ranks import on_ranks

from lathe.launch.process_group import (
    CollectiveTimeout,
    find_timeout,
    init_process_group,
    save_timeout,
    take_timeouts,
)


@pytest.mark.parametrize(
    ("local_ranks", "world", "who"),
    [
        ([0, 1, 2], 3, "rank 2 did not come"),
        ([0, 1, 2, 3], 4, "ranks 2, 3 did not come"),
        ([0, 1], 4, "a rank on another node did not come"),
        ([0, 1], 2, "every rank waited, so they called different collectives"),
    ],
)
def test_ranks_without_a_file_are_those_that_did_not_join(
    tmp_path: Path, local_ranks: list[int], world: int, who: str
) -> None:
    assert take_timeouts(tmp_path) is None
    for rank, seconds in ((1, 2.0), (0, 0.0)):
        save_timeout(tmp_path, CollectiveTimeout(rank, "broadcast", 4, seconds), local_ranks, world, patience=0)
    said = "rank 1 waited longer than launch.timeout=2 seconds in broadcast (step 4): "
    assert take_timeouts(tmp_path) == said + who
    assert take_timeouts(tmp_path) is None


def limits(rank: int, port: int, folder: str) -> list[CollectiveTimeout | None]:
    """Return the timeouts of rank 0 in the default group and in a subgroup while rank 1 does not join."""
    torch.distributed.barrier()  # a rank that exits while the other still connects would close its connection
    torch.distributed.destroy_process_group()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(port)
    trainer = {"accelerator": "cpu", "devices": 2}
    time.sleep(1.5 * rank)  # longer than the limit, which does not apply to the start
    for _ in range(2):  # the second time the group exists
        init_process_group(trainer, rank, 2, rank, 1.0)
    met = []
    for group in (torch.distributed.new_group([0, 1]), None):
        if rank == 0:
            with pytest.raises(RuntimeError) as caught:
                torch.distributed.all_gather([torch.zeros(1)] * 2, torch.zeros(1), group=group)
            met.append(find_timeout(caught.value))
    Path(folder, str(rank)).touch()
    while not Path(folder, "0").exists():
        time.sleep(0.05)
    torch.distributed.destroy_process_group()  # broken; on_ranks ends with a barrier
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    return met


def test_every_group_has_the_limit_and_a_late_start_is_no_hang(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    met, _ = on_ranks(limits, port, str(tmp_path))
    assert met == [CollectiveTimeout(0, "all_gather", None, 1.0)] * 2
