"""Ranks: a job in this process, or one process per device under torch's own elastic agent."""

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
from typing import Any

from lathe.errors import Stopped, UserError
from lathe.files import scratch, uninterrupted
from lathe.launch.group import bring_up, leave_note, read_notes, waited
from lathe.launch.nodes import Nodes
from lathe.launch.numa import numa_mode
from lathe.launch.streams import plain_warnings, quiet_torch, usable_streams
from lathe.launch.telling import full_error, own_sentence, sentence_for
from lathe.launch.threads import choose_threads, use_threads
from lathe.runs.typed import run_command, run_words

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # what the agent passes on to its workers before it leaves


UNGUARDED = 78  # exit code of a worker that came to lathe.train again, when it imported the script that had called it


OLDER_JOBS = {"lathe.run:train": "lathe.verbs.train:train"}  # as commands of a user's own may still name them


def imported(name: str) -> ModuleType:
    """The module. While it is imported nobody looks for garbage, and later nobody does among what it brought, since all
    of that stays: a fifth of the time that torch and Lightning take.
    """
    if name in sys.modules or not gc.isenabled():
        return importlib.import_module(name)
    gc.disable()
    try:
        with uninterrupted():  # torch and numpy end in the strangest ways where a Ctrl-C breaks off their import
            return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def call(job: str, cfg: dict[str, Any]) -> Any:
    """Calls the function named `module:function` with `cfg`.

    Raises:
        UserError: a part ended the process as if all were done, which whoever started it would believe.
    """
    module, _, function = OLDER_JOBS.get(job, job).partition(":")
    try:
        with use_threads(cfg):
            return getattr(imported(module), function)(cfg)
    except SystemExit as error:
        if error.code:
            raise
        said = "a part called sys.exit(): raise an error there, or trainer.should_stop=True to end early"
        raise UserError(f"The run ended before it was done, for {said}.") from error


def execute(job: str, cfg: dict[str, Any], processes: int, options: dict[str, Any], nodes: Nodes | None = None) -> Any:
    """Runs `job` in this process, or in `processes` workers under the elastic agent, which meets those of the other
    `nodes`; returns rank 0's value, or None on a machine that rank 0 is not on. `options` is the configuration's
    `launch` group.

    Raises:
        UserError: a worker met a user's mistake, or died or waited too long and no restart was left.
        Stopped: a signal ended the run, which can be resumed.
    """
    if options.get("threads") == "auto":  # a training run has its number already
        options["threads"], _ = choose_threads("auto", processes)
    nodes, numa = nodes or Nodes(), numa_mode(cfg, options["numa"])
    if processes == 1 and options["max_restarts"] == 0 and not nodes.several and numa is None:
        return call(job, cfg)
    # A cached rendezvous store makes the first restart after a killed worker fail in half of the cases (torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    if not full_error():  # their tables of failures are told in one sentence here
        for name in list(logging.root.manager.loggerDict):  # each has a level of its own
            if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    run_dir = cfg["paths"].get("run_dir")
    with scratch() as folder:
        try:
            results = elastic_launch(_launch_config(processes, options, nodes, numa), worker)(
                job, cfg, str(folder), options["timeout"]
            )
            _raise_told(folder)
            return (results or {}).get(0)
        except SignalException as error:
            command = run_command("train.py", "resume", run_dir, cfg) if run_dir else None
            raise Stopped(signal.Signals(error.sigval).name, command) from error
        except RendezvousError as error:
            raise UserError(_not_met(error, options, nodes)) from error
        except ChildFailedError as error:
            _raise_told(folder)
            rank, failure = error.get_first_failure()
            way = "set launch.max_restarts"
            if run_dir:
                way = f"continue with {shlex.join(run_words('resume', run_dir, cfg))}, or {way}"
            left = f"launch.max_restarts={options['max_restarts']} leaves no restart: {way}."
            hung = _hung(folder)
            if hung is not None:
                raise UserError(f"{hung} (if it was only slow, raise launch.timeout), and {left}") from error
            if failure.exitcode == UNGUARDED:
                raise UserError(
                    "lathe.train on several devices starts processes that import this script again: guard the call by "
                    'if __name__ == "__main__":'
                ) from None
            if failure.exitcode < 0 or not failure.message:
                how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
                raise UserError(f"rank {rank} died ({how}) and {left}") from error
            raise RuntimeError(f"rank {rank} failed: {failure.message}\n{_stack(failure.error_file)}") from None


def _not_met(error: Exception, options: dict[str, Any], nodes: Nodes) -> str:
    kind = type(error).__name__
    if kind == "RendezvousTimeoutError":
        waited_for = (
            f"after launch.join_timeout={options['join_timeout']} seconds too few machines had met at launch.endpoint="
        )
        return f"launch.nodes={options['nodes']}: {waited_for}{nodes.endpoint}: start the same command on all of them."
    if kind == "RendezvousClosedError":
        return (
            f"launch.id={nodes.launch_id}: another node has ended this run: read what it said, then start all of "
            "them again."
        )
    return (
        f"launch.endpoint={nodes.endpoint} can't be reached: give host:port of one of the nodes, the same on all of "
        "them."
    )


def _launch_config(processes: int, options: dict[str, Any], nodes: Nodes, numa: str | None) -> Any:
    from torch.distributed.launcher.api import LaunchConfig

    extra: dict[str, Any] = {}
    if numa is not None:
        from torch.numa.binding import AffinityMode, NumaOptions

        extra["numa_options"] = NumaOptions(affinity_mode=AffinityMode(numa))
    if nodes.several:
        join = max(1, int(options["join_timeout"]))
        extra["rdzv_configs"] = {
            "join_timeout": join,
            "last_call_timeout": max(1, int(options["last_call_timeout"])),
            "read_timeout": join,
        }
    return LaunchConfig(
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


def _raise_told(folder: Path) -> None:
    for name in ("mistake", "stop"):
        path = folder / f"{name}.json"
        if path.exists():
            words = json.loads(path.read_text())
            raise Stopped(words["signal"], words["command"]) if name == "stop" else UserError(words["sentence"])


def _hung(folder: Path) -> str | None:
    """What the ranks of the last start say about one that did not come."""
    try:
        start = json.loads((folder / "start.json").read_text())
    except (OSError, ValueError):
        return None
    return read_notes(folder, start["restart"], start["local_ranks"], start["world_size"])


def _stack(error_file: str) -> str:
    try:
        return str(json.loads(Path(error_file).read_text())["message"]["extraInfo"]["py_callstack"])
    except (OSError, KeyError, TypeError, ValueError):
        return ""


def worker(job: str, cfg: dict[str, Any], name: str, timeout: float) -> Any:
    """One rank under the elastic agent. What its parent is to say is left in the folder `name`: a user's mistake, a
    stop that was asked for, or where it waited too long."""
    _die_with_parent()
    usable_streams()
    plain_warnings()
    quiet_torch()
    folder = Path(name)
    if (folder / "mistake.json").exists():
        raise SystemExit(1)  # a restart can't mend what was typed
    (folder / "stop.json").unlink(missing_ok=True)  # the agent has stopped its workers to start them again
    import torch

    rank, local_rank, restart = (int(os.environ[key]) for key in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"))
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    local_ranks = list(range(rank - local_rank, rank - local_rank + local))
    if local_rank == 0:
        before = _hung(folder) if restart else None
        (folder / "start.json").write_text(
            json.dumps({"restart": restart, "local_ranks": local_ranks, "world_size": world})
        )
        if restart and rank == 0:
            allowed = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
            print(f"{before or 'A worker died'}: restart {restart} of {allowed}, from the last checkpoint.", flush=True)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
    try:
        if "trainer" in cfg:
            cfg["trainer"]["num_nodes"] = world // local  # as many as have met
            bring_up(cfg["trainer"], rank, world, local_rank, timeout)
        return call(job, cfg)
    except Stopped as stop:
        _leave_word(folder / "stop.json", {"signal": stop.signal, "command": stop.command})
        return None  # all ranks stop at the same step; a failure would be started again
    except Exception as error:
        note = waited(error)
        if note is not None:
            leave_note(folder, restart, note, local_ranks)
            if note.seconds and not full_error():
                raise SystemExit(1) from error
        sentence = None if note is not None else sentence_for(error)
        last = restart >= int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        if sentence is None and note is None and last:  # before, what a user's own code raises is tried again
            sentence = own_sentence(error)
        if sentence is None or full_error():
            raise
        _leave_word(folder / "mistake.json", {"sentence": sentence})
        raise SystemExit(1) from error
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # gloo aborts a process that ends with one


def _leave_word(path: Path, words: dict[str, Any]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(words))
    with suppress(FileExistsError):
        os.link(temporary, path)  # whole at once; the first rank's words stay


def _die_with_parent() -> None:
    """Asks Linux to kill this worker when its agent dies, so that no orphan goes on writing to a run that someone
    resumes.
    """
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
