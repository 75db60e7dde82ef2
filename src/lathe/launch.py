"""From a composed configuration to running processes: one in place, or one per device under torch's own elastic agent.

Hydra has composed once, here, in the parent. Every rank receives the resolved configuration as plain data; none runs Hydra again.
torch is imported only once it is certain that there is something to run.
"""

import functools
import importlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lathe import rundir
from lathe.config import CPU_PROCESSES_PER_CORE, check_types, check_values, differences, explain, require, resolve
from lathe.errors import Stopped, UserError
from lathe.outer import Outer, detect_outer

FULL_ERROR = "LATHE_FULL_ERROR"
FREE_ON_RESUME = ("resume", "launch", "hydra")


def one_sentence(main: Callable[[], Any]) -> Callable[[], None]:
    """Decorates a Hydra main: a user's mistake costs one line on stderr and exit code 1, a bug still shows its traceback.

    Hydra prints several lines for an error of its own unless HYDRA_FULL_ERROR is set, and then raises it. It is set here, so that the
    sentence can be made from the exception; what the user had set is kept in LATHE_FULL_ERROR.
    """

    @functools.wraps(main)
    def wrapped() -> None:
        os.environ.setdefault(FULL_ERROR, os.environ.get("HYDRA_FULL_ERROR", "0"))
        os.environ["HYDRA_FULL_ERROR"] = "1"
        try:
            main()
        except Exception as error:
            sys.exit(tell(error))

    return wrapped


def tell(error: Exception) -> int:
    """Prints what went wrong and returns the exit code."""
    outer = detect_outer()
    if outer is not None and outer.rank != 0 and isinstance(error, UserError):
        return 1  # rank 0 says it
    sentence = explain(error, _groups()) or _foreign_sentence(error)
    if sentence is None or os.environ.get(FULL_ERROR) == "1":
        traceback.print_exception(error)
    else:
        print(f"Error: {sentence}", file=sys.stderr)
    return error.code if isinstance(error, Stopped) else 1


def _groups() -> list[str]:
    """Names that may start an override: groups and keys of the composition's root, read off the configuration folder."""
    configs = Path(sys.argv[0]).resolve().parent / "configs"
    if not configs.is_dir():
        configs = Path(sys.argv[0]).resolve().parent.parent / "configs"
    if not configs.is_dir():
        return []
    groups = [path.name for path in configs.iterdir() if path.is_dir()]
    root = OmegaConf.load(configs / "train.yaml")
    return groups + [str(key) for key in root if key != "defaults"]


def _foreign_sentence(error: Exception) -> str | None:
    """A sentence for another library's exception that a user can mend, or None if it is a bug."""
    if isinstance(error, OSError):
        return rundir.disk_sentence(error)
    kind = type(error).__name__
    if kind == "OutOfMemoryError":
        return "the GPU's memory is used up: lower data.batch_size, or try precision=bf16-mixed or trainer.accumulate_grad_batches."
    if kind == "MisconfigurationException":
        return " ".join(str(error).split())
    return None


def launch(cfg: DictConfig, job: str) -> Any:
    """Runs `job`, a function named `module:function`, on the resolved `cfg` and returns what rank 0 returned.

    A training job gets a run directory first: a fresh one, or the one that `resume` names.

    Raises:
        UserError: the configuration can't work, told before any data or device is touched.
    """
    try:
        return _launch(cfg, job)
    except Exception as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise  # Hydra goes on with the sweep's other jobs and raises this at the end
        sys.exit(tell(error))


def _launch(cfg: DictConfig, job: str) -> Any:
    for key in ("data_dir", "log_dir"):  # so that a run directory can be used from any working directory
        cfg.paths[key] = os.path.abspath(str(cfg.paths[key]))
    resolved = resolve(cfg)
    outer = detect_outer()
    require(outer is None or HydraConfig.get().mode != RunMode.MULTIRUN,
            "A sweep (-m) under torchrun or srun would be run once per rank: start it with python, or sweep outside.")  # fmt: skip
    _check(cfg, resolved)
    processes = count_processes(resolved, outer)
    batch_size = resolved["data"].get("batch_size")
    world = outer.world_size if outer else processes * int(resolved["trainer"]["num_nodes"])
    require(batch_size is None or resolved["strategy"].get("processes") == "one" or batch_size % world == 0,
            f"data.batch_size={batch_size} is the global batch and does not divide by trainer.devices x trainer.num_nodes = {world}: choose a "
            f"multiple of {world}.")  # fmt: skip
    if outer is not None and outer.rank != 0:
        return call(job, outer.receive())
    fresh, run, resolved = _choose_run(resolved, outer)
    if run.complete and not fresh:
        print(f"{run.path} is complete; raise trainer.max_epochs to train it further.")
        return None
    try:
        with run.locked():
            if not fresh:
                (run.path / "result.json").unlink(missing_ok=True)
                run.save_config(resolved)
            if outer is not None:
                outer.send(resolved)
            options = resolved["launch"]
            result = execute(job, resolved, 1 if outer else processes, options["max_restarts"], options["monitor_interval"])
    except UserError:
        if fresh and not (run.path / "metrics.csv").exists():
            shutil.rmtree(run.path, ignore_errors=True)  # refused before it began: leave nothing half-written
        raise
    return (result or {}).get("objective")


def _typed() -> list[str]:
    return [str(item) for item in HydraConfig.get().overrides.task]


def _key(override: str) -> str:
    return override.lstrip("+~").split("=", 1)[0].split("@", 1)[0]


def _compose(overrides: list[str]) -> dict[str, Any]:
    return resolve(compose(config_name=HydraConfig.get().job.config_name, overrides=overrides))


def _check(cfg: DictConfig, resolved: dict[str, Any]) -> None:
    typed = _typed()
    choices = HydraConfig.get().runtime.choices
    groups = [item for item in typed if _key(item) in choices]
    values = [_key(item) for item in typed if _key(item) not in choices and not item.startswith("~")]
    if values:
        check_types(values, resolved, _compose(groups))
    check_values(resolved)


def count_processes(cfg: dict[str, Any], outer: Outer | None = None) -> int:
    """How many processes this node runs for `trainer.devices`.

    Raises:
        UserError: more devices are asked for than there are, or an accelerator that is not there.
    """
    trainer = cfg["trainer"]
    accelerator, devices = trainer["accelerator"], trainer["devices"]
    several = len(devices) if isinstance(devices, list) else devices
    cores = os.cpu_count() or 1
    if accelerator == "cpu" or (accelerator == "auto" and several == 1):
        several = 1 if several in ("auto", -1) else several
        require(several <= max(8, CPU_PROCESSES_PER_CORE * cores),
                f"trainer.devices={devices} asks for {several} processes on {cores} cores: use at most "
                f"{max(8, CPU_PROCESSES_PER_CORE * cores)}.")  # fmt: skip
    else:
        import torch

        there = torch.cuda.device_count()
        mps = accelerator == "mps" or (accelerator in ("auto", "gpu") and not there and torch.backends.mps.is_available())
        if mps:
            require(torch.backends.mps.is_available(), "trainer.accelerator=mps: there is none here; use trainer.accelerator=auto.")
            there = 1
        elif accelerator == "auto" and not there:
            return count_processes({**cfg, "trainer": {**trainer, "accelerator": "cpu"}}, outer)
        require(there > 0, f"trainer.accelerator={accelerator}: no GPU is visible here; use trainer.accelerator=cpu or auto.")
        several = there if several in ("auto", -1) else several
        require(several <= there, f"trainer.devices={devices} asks for {several} GPUs, but {there} are here: ask for at most {there}.")
        if isinstance(devices, list):
            require(all(isinstance(index, int) and 0 <= index < there for index in devices),
                    f"trainer.devices={devices} names a GPU that is not here: give numbers from 0 to {there - 1}.")  # fmt: skip
    if outer is not None:
        nodes, local = int(trainer["num_nodes"]), int(several)
        require(outer.world_size == local * nodes,
                f"trainer.devices x trainer.num_nodes = {local * nodes}, but the launcher started {outer.world_size} processes: make them "
                "equal.")  # fmt: skip
    elif int(trainer["num_nodes"]) > 1:
        raise UserError(f"trainer.num_nodes={trainer['num_nodes']}: start a run on several machines with torchrun or srun on each of them.")
    return 1 if cfg["strategy"].get("processes") == "one" else int(several)


def _choose_run(cfg: dict[str, Any], outer: Outer | None) -> tuple[bool, rundir.RunDir, dict[str, Any]]:
    """Whether the run is new, its directory, and the configuration it goes by."""
    log_dir, resume = Path(cfg["paths"]["log_dir"]), cfg["resume"]
    found = None
    if resume == "auto":
        found = rundir.find_unfinished(log_dir, cfg)
    elif resume is not None:
        run = rundir.open_run(resume, "resume")
        return False, run, _continued(run, cfg)
    elif outer is not None and outer.restarted:
        found = rundir.find_launch(log_dir, str(cfg["name"]), outer.launch_id)
    if found is not None:
        print(f"Continuing {found.path}")
        own = found.config
        own["launch"], own["paths"] = cfg["launch"], {**cfg["paths"], "run_dir": str(found.path)}
        return False, found, own
    cfg["resume"] = None
    typed = [item for item in _typed() if _key(item) != "resume"]
    return True, rundir.create(log_dir, cfg, typed, outer.launch_id if outer else None), cfg


def _continued(run: rundir.RunDir, cfg: dict[str, Any]) -> dict[str, Any]:
    """The run's own configuration, longer if the command raises its end.

    Raises:
        UserError: the command would change anything else; the sentence lists what.
    """
    saved = run.config
    typed = [item for item in _typed() if _key(item).split(".")[0] not in FREE_ON_RESUME]
    if typed:
        own = list(OmegaConf.load(run.path / "overrides.yaml"))
        lines = []
        for line in differences(_compose(own), _compose(own + typed), rundir.NOT_THE_EXPERIMENT):
            key = line.split(":", 1)[0]
            if key in ("trainer.max_epochs", "trainer.max_steps"):
                new, old = _lookup(_compose(own + typed), key), _lookup(saved, key)
                if isinstance(new, int) and (old is None or new == -1 or (old != -1 and new >= old)):
                    saved["trainer"][key.split(".")[1]] = new
                    continue
            lines.append(line)
        require(not lines, f"resume={cfg['resume']} keeps the run's own configuration, but the command changes {'; '.join(lines)}: leave "
                           "that out, or start a new run from its weights with ckpt_path.")  # fmt: skip
        ends = [_lookup(saved, "trainer.max_epochs"), _lookup(saved, "trainer.max_steps")]
        if run.complete and ends == [_lookup(run.config, "trainer.max_epochs"), _lookup(run.config, "trainer.max_steps")]:
            return saved
        if run.complete:
            (run.path / "result.json").unlink()
    saved["launch"], saved["paths"] = cfg["launch"], {**cfg["paths"], "run_dir": str(run.path)}
    return saved


def _lookup(tree: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def call(job: str, cfg: dict[str, Any]) -> Any:
    """Calls the function named `module:function` with `cfg`."""
    module, _, function = job.partition(":")
    return getattr(importlib.import_module(module), function)(cfg)


def execute(job: str, cfg: dict[str, Any], processes: int, max_restarts: int = 0, monitor_interval: float = 0.1) -> Any:
    """Runs `job` in this process, or in `processes` workers under the elastic agent; returns rank 0's value.

    Raises:
        UserError: a worker met a user's mistake, or died and no restart was left.
        Stopped: a signal ended the run, which can be resumed.
    """
    require(isinstance(max_restarts, int) and max_restarts >= 0, f"launch.max_restarts={max_restarts!r}: give a whole number from 0.")
    if processes == 1 and max_restarts == 0:
        return call(job, cfg)
    # A cached rendezvous store makes the first restart after a killed worker fail in half of the cases (torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if os.environ.get(FULL_ERROR) != "1":
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its tables of failures are told in one sentence here
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=processes, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
                          run_id=Path(tempfile.mktemp()).name, max_restarts=max_restarts, monitor_interval=monitor_interval,
                          start_method="spawn")  # fmt: skip # noqa: S306 - only a random word
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
        print(f"A worker died: restart {restart} of {os.environ.get('TORCHELASTIC_MAX_RESTARTS', '?')}, from the last checkpoint.", flush=True)
    try:
        return call(job, cfg)
    except Stopped as stop:
        _leave_word(told, {"signal": stop.signal, "run_dir": stop.run_dir, "sentence": str(stop)})
        raise SystemExit(stop.code) from stop
    except Exception as error:
        sentence = explain(error) or _foreign_sentence(error)
        if sentence is None or os.environ.get(FULL_ERROR) == "1":
            raise
        _leave_word(told, {"signal": None, "run_dir": None, "sentence": sentence})
        raise SystemExit(1) from error


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
