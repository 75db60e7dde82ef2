"""Run a job in this process, or in one process per device under torch's elastic agent."""

import gc
import importlib
import json
import logging
import os
import shlex
import signal
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from lathe.errors import Stopped, UserError
from lathe.files import scratch, uninterrupted
from lathe.launch.devices import Nodes, choose_threads, numa_mode, use_threads
from lathe.launch.error_reporting import explain_error, explain_user_code, full_error, prepare_stdio
from lathe.launch.process_group import find_timeout, init_process_group, save_timeout, take_timeouts
from lathe.runs.rundir import quote_value, run_command

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # passed on to the workers
UNGUARDED = 78  # exit code of a worker that called lathe.train again while it imported the script


def import_job(name: str) -> ModuleType:
    """Import a module without garbage collection, and freeze what it brought: saves a fifth of torch's import time."""
    if name in sys.modules or not gc.isenabled():
        return importlib.import_module(name)
    gc.disable()
    try:
        with uninterrupted():  # Ctrl-C during the import of torch or numpy leaves them half initialised
            return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def call_job(job: str, cfg: dict[str, Any]) -> Any:
    """Call the function named `module:function` with `cfg`; ranks get the name, since not every function pickles."""
    module, _, function = job.partition(":")
    try:
        with use_threads(cfg):
            return getattr(import_job(module), function)(cfg)
    except SystemExit as error:  # without an exit code it would look like success
        if error.code:
            raise
        message = "A component called sys.exit(). Raise an exception, or set trainer.should_stop=True."
        raise UserError(message) from error


def run_job(job: str, cfg: dict[str, Any], processes: int, options: dict[str, Any], nodes: Nodes | None = None) -> Any:
    """Run `job` in this process, or in `processes` workers, together with those of the other `nodes`.

    Returns rank 0's value; None on a machine without rank 0. `options` is the configuration's `launch` group.
    """
    if options.get("threads") == "auto":  # training has chosen its number already
        options["threads"], _ = choose_threads("auto", processes)
    nodes, numa = nodes or Nodes(), numa_mode(cfg, options["numa"])
    if processes == 1 and options["max_restarts"] == 0 and not nodes.several and numa is None:
        return call_job(job, cfg)
    # With a cached rendezvous store half of the first restarts after a killed worker fail (torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if not full_error():  # torch's tables of failures; the error is reported by the parent
        for name in list(logging.root.manager.loggerDict):  # each has its own level
            if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    extra: dict[str, Any] = {}
    if numa is not None:
        from torch.numa.binding import AffinityMode, NumaOptions

        extra["numa_options"] = NumaOptions(affinity_mode=AffinityMode(numa))
    if nodes.several:
        join, last_call = (max(1, int(options[name])) for name in ("join_timeout", "last_call_timeout"))
        extra["rdzv_configs"] = {"join_timeout": join, "last_call_timeout": last_call, "read_timeout": join}
    config = LaunchConfig(
        min_nodes=nodes.least,
        max_nodes=nodes.most,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint=nodes.endpoint,
        run_id=str(nodes.launch_id) if nodes.several else uuid.uuid4().hex,
        local_addr=nodes.address,
        max_restarts=options["max_restarts"],
        monitor_interval=options["monitor_interval"],
        start_method="spawn",
        signals_to_handle=SIGNALS,
        **extra,
    )
    run_dir = cfg["paths"].get("run_dir")
    with scratch() as folder:
        try:
            results = elastic_launch(config, worker)(job, cfg, str(folder), options["timeout"])
            _raise_outcome(folder)
            return (results or {}).get(0)
        except SignalException as error:
            command = run_command("train.py", "resume", run_dir) if run_dir else None
            raise Stopped(signal.Signals(error.sigval).name, command) from error
        except RendezvousError as error:
            raise UserError(_explain_rendezvous(error, options, nodes)) from error
        except ChildFailedError as error:
            _raise_outcome(folder)
            _raise_failure(error, folder, run_dir, options["max_restarts"])


def _explain_rendezvous(error: Exception, options: dict[str, Any], nodes: Nodes) -> str:
    """The message for machines that did not meet."""
    if type(error).__name__ == "RendezvousTimeoutError":
        return (
            f"launch.nodes={options['nodes']}: too few machines at launch.endpoint={nodes.endpoint} after "
            f"launch.join_timeout={options['join_timeout']} seconds. Start the same command on all of them."
        )
    if type(error).__name__ == "RendezvousClosedError":
        return f"launch.id={nodes.launch_id}: another node ended this run. Start all nodes again."
    return f"launch.endpoint={nodes.endpoint} can't be reached. Give host:port of one node, the same on all."


def _raise_failure(error: Any, folder: Path, run_dir: str | None, max_restarts: int) -> NoReturn:
    """Raise the error for ranks that timed out, died or failed, from torch's ChildFailedError."""
    rank, failure = error.get_first_failure()
    fix = "set launch.max_restarts"
    if run_dir:
        fix = f"continue with {shlex.quote(f'resume={quote_value(str(run_dir))}')}, or {fix}"
    no_restart = f"launch.max_restarts={max_restarts} leaves no restart: {fix}."
    timeouts = take_timeouts(folder)
    if timeouts is not None:
        raise UserError(f"{timeouts} (if it was only slow, raise launch.timeout), and {no_restart}") from error
    if failure.exitcode == UNGUARDED:
        raise UserError(
            "lathe.train on several devices starts processes that import this script again. Guard the call by "
            'if __name__ == "__main__":'
        ) from None
    if failure.exitcode < 0 or not failure.message:
        how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        raise UserError(f"rank {rank} died ({how}) and {no_restart}") from error
    stack = ""
    with suppress(OSError, KeyError, TypeError, ValueError):
        stack = json.loads(Path(failure.error_file).read_text())["message"]["extraInfo"]["py_callstack"]
    raise RuntimeError(f"rank {rank} failed: {failure.message}\n{stack}") from None


def _raise_outcome(folder: Path) -> None:
    """Raise what a worker has saved: its user's mistake, or the signal that stopped it."""
    for name in ("mistake", "stop"):
        path = folder / f"{name}.json"
        if path.exists():
            saved = json.loads(path.read_text())
            raise Stopped(saved["signal"], saved["command"]) if name == "stop" else UserError(*saved["messages"])


def worker(job: str, cfg: dict[str, Any], notes: str, timeout: float) -> Any:
    """One rank under the elastic agent.

    It saves what the parent reports in the folder `notes`: a user's mistake, a stop, or where it timed out.
    """
    die_with_parent()
    prepare_stdio()
    folder = Path(notes)
    if (folder / "mistake.json").exists():
        raise SystemExit(1)  # a restart can't fix it
    (folder / "stop.json").unlink(missing_ok=True)  # the agent has stopped its workers to restart them
    import torch

    rank, local_rank, restart = (int(os.environ[key]) for key in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"))
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    max_restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    local_ranks = list(range(rank - local_rank, rank - local_rank + local))
    if restart and local_rank == 0:
        reason = take_timeouts(folder) or "A worker died"
        if rank == 0:
            print(f"{reason}: restart {restart} of {max_restarts}, from the last checkpoint.", flush=True)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
    try:
        if "trainer" in cfg:
            cfg["trainer"]["num_nodes"] = world // local  # as many as have joined
            init_process_group(cfg["trainer"], rank, world, local_rank, timeout)
        return call_job(job, cfg)
    except Stopped as stop:
        _save_once(folder / "stop.json", {"signal": stop.signal, "command": stop.command})
        return None  # all ranks stop at the same step; a failure would be restarted
    except Exception as error:
        timed_out = find_timeout(error)
        if timed_out is not None:
            save_timeout(folder, timed_out, local_ranks, world)
            if timed_out.seconds and not full_error():
                raise SystemExit(1) from error
            raise
        explained = explain_error(error)
        if explained is None and restart >= max_restarts:  # an error of the user's code may be gone after a restart
            explained = explain_user_code(error)
        if explained is None or full_error():
            raise
        _save_once(folder / "mistake.json", {"messages": explained.args})
        raise SystemExit(1) from error
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # gloo aborts a process that exits with one


def _save_once(path: Path, content: dict[str, Any]) -> None:
    """Write the whole file at once, unless another rank has."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content))
    with suppress(FileExistsError):
        os.link(temporary, path)


def die_with_parent() -> None:
    """Ask Linux to kill this worker when its agent dies, so that no orphan writes to a run that is resumed."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
