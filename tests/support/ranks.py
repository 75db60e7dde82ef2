"""Runs a function of a test module in processes that form a gloo group, forked as in `processes.py`."""

import importlib.util
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from support.processes import server


def on_ranks(function: Callable[..., Any], *args: Any, world: int = 2, timeout: float = 60) -> list[Any]:
    """Run `function(rank, *args)` on each of `world` ranks; return tensors and plain data by rank.

    The environment is that of a torchrun worker. `function` must be at the top level of its module.
    """
    context = server()
    with tempfile.TemporaryDirectory() as folder:
        where = (function.__code__.co_filename, function.__name__)
        processes = [
            context.Process(target=_rank, args=(rank, world, folder, where, args), daemon=True) for rank in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        errors = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
        assert not errors, "\n".join(errors)
        assert [process.exitcode for process in processes] == [0] * world
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _rank(rank: int, world: int, folder: str, where: tuple[str, str], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        GROUP_RANK="0",
        MASTER_ADDR="localhost",
        MASTER_PORT="0",
        TORCHELASTIC_RUN_ID="test",
    )
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        spec = importlib.util.spec_from_file_location("ranked", where[0])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        torch.save(getattr(module, where[1])(rank, *args), Path(folder) / f"{rank}.pt")
        torch.distributed.barrier()
    except BaseException:
        (Path(folder) / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise SystemExit(1) from None
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
