"""Ranks: a job in this process, or one process per device under torch's own elastic agent."""

import importlib
import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from lathe.config import require
from lathe.errors import Stopped, UserError
from lathe.telling import full_error, sentence_for


def call(job: str, cfg: dict[str, Any]) -> Any:
    """Calls the function named `module:function` with `cfg`."""
    module, _, function = job.partition(":")
    return getattr(importlib.import_module(module), function)(cfg)


def execute(job: str, cfg: dict[str, Any], processes: int, options: dict[str, Any]) -> Any:
    """Runs `job` in this process, or in `processes` workers under the elastic agent; returns rank 0's value. `options` is the
    configuration's `launch` group.

    Raises:
        UserError: a worker met a user's mistake, or died and no restart was left.
        Stopped: a signal ended the run, which can be resumed.
    """
    max_restarts, monitor_interval = options["max_restarts"], options["monitor_interval"]
    require(
        isinstance(max_restarts, int) and max_restarts >= 0, f"launch.max_restarts={max_restarts!r}: give a whole number from 0."
    )
    if processes == 1 and max_restarts == 0:
        return call(job, cfg)
    # A cached rendezvous store makes the first restart after a killed worker fail in half of the cases (torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if not full_error():
        for name in (
            "torch.distributed.elastic",
            "torch.multiprocessing",
        ):  # their tables of failures are told in one sentence here
            logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=processes, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
                          run_id=uuid.uuid4().hex, max_restarts=max_restarts, monitor_interval=monitor_interval,
                          start_method="spawn")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="lathe-") as folder:
        told = Path(folder) / "told.json"
        try:
            return elastic_launch(config, worker)(job, cfg, str(told))[0]
        except SignalException as error:
            raise Stopped(signal.Signals(error.sigval).name, cfg["paths"].get("run_dir")) from error
        except ChildFailedError as error:
            _raise_told(told)
            rank, failure = error.get_first_failure()
            if failure.exitcode < 0 or not failure.message:
                how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
                raise UserError(
                    f"rank {rank} died ({how}) and launch.max_restarts={max_restarts} leaves no restart: continue with resume="
                    f"{cfg['paths'].get('run_dir')}, or set launch.max_restarts."
                ) from error
            raise RuntimeError(f"rank {rank} failed: {failure.message}\n{_stack(failure.error_file)}") from None


def _raise_told(told: Path) -> None:
    if not told.exists():
        return
    words = json.loads(told.read_text())
    if words["signal"]:
        raise Stopped(words["signal"], words["run_dir"])
    raise UserError(words["sentence"])


def _stack(error_file: str) -> str:
    try:
        return str(json.loads(Path(error_file).read_text())["message"]["extraInfo"]["py_callstack"])
    except (OSError, KeyError, TypeError, ValueError):
        return ""


def worker(job: str, cfg: dict[str, Any], told: str) -> Any:
    """One rank under the elastic agent. A user's mistake is written to the file `told` for the parent to say, once."""
    _die_with_parent()
    if Path(told).exists():
        raise SystemExit(1)  # a restart can't mend what was typed, and must not undo a stop that was asked for
    import torch

    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restart and int(os.environ["RANK"]) == 0:
        allowed = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        print(f"A worker died: restart {restart} of {allowed}, from the last checkpoint.", flush=True)
    try:
        return call(job, cfg)
    except Stopped as stop:
        _leave_word(told, {"signal": stop.signal, "run_dir": stop.run_dir, "sentence": str(stop)})
        raise SystemExit(stop.code) from stop
    except Exception as error:
        sentence = sentence_for(error)
        if sentence is None or full_error():
            raise
        _leave_word(told, {"signal": None, "run_dir": None, "sentence": sentence})
        raise SystemExit(1) from error
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # gloo aborts a process that ends with one


def _leave_word(told: str, words: dict[str, Any]) -> None:
    try:
        with open(told, "x") as file:  # the first rank's words stay
            json.dump(words, file)
    except FileExistsError:
        pass


def _die_with_parent() -> None:
    """Asks Linux to kill this worker when its agent dies, so that no orphan goes on writing to a run that someone resumes."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
