"""From a composed configuration to running processes: one in place, or one per device under torch's own elastic agent.

Hydra has composed once, here, in the parent. Every rank receives the resolved configuration as plain data; none runs
Hydra again. torch is imported only once it is certain that there is something to run.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lathe import trust
from lathe.config.composed import check, data_at, differences, flatten, mistyped, pinned, resolve
from lathe.config.direction import check_direction
from lathe.config.idle import idle
from lathe.config.mesh import data_replicas
from lathe.config.schema import Together, key_schemas
from lathe.config.stages import check_compression
from lathe.config.words import key_of
from lathe.errors import Stopped, refuse, require
from lathe.launch.agent import call, execute
from lathe.launch.continued import end_of, kept_words, owes_receipt, resume_words, typed_words
from lathe.launch.devices import count_processes
from lathe.launch.found import find_run
from lathe.launch.named import name_checkpoint, name_export
from lathe.launch.nodes import Nodes, arriving, read_nodes
from lathe.launch.outer import Outer, detect_outer
from lathe.launch.stops import stoppable
from lathe.launch.sweep import check_sweep_words, job_of
from lathe.launch.telling import one_sentence, tell
from lathe.launch.threads import choose_threads
from lathe.runs import rundir

__all__ = ["launch", "launch_on_run", "one_sentence"]

# Where those scripts write that paths.log_dir does not concern: there it is the place of Hydra's own sweepers alone.
ELSEWHERE = {
    "compress": "makes the new run beside its run",
    "evaluate": "writes where output= says",
    "export": "writes into its run",
    "make_shards": "writes where output= says",
    "predict": "writes where output= says",
    "prepare_tokens": "writes where output= says",
    "profile": "writes into its run",
    "receipt": "writes into its run",
    "report": "writes where output= says",
    "sensitivity": "writes into its run",
    "serve": "writes no files",
}


def launch(cfg: DictConfig, job: str) -> Any:
    """Runs `job`, a function named `module:function`, on the resolved `cfg` and returns what rank 0 returned.

    A training job gets a run directory first: a fresh one, or the one that `resume` names.

    Raises:
        UserError: the configuration can't work, told before any data or device is touched.
    """
    try:
        return launched(cfg, job)[0]
    except Exception as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN and not isinstance(error, Stopped):
            raise  # Hydra goes on with the sweep's other jobs and raises this at the end; a signal means the sweep too
        sys.exit(tell(error))


def launched(cfg: DictConfig, job: str) -> tuple[Any, str]:
    """As `launch`, whose exceptions are raised, with the run directory beside what rank 0 returned."""
    check_sweep_words(typed_words())
    typed, around = resolve(cfg), detect_outer()
    # What a run that is continued or joined is made of, it says itself.
    alone = typed.get("resume") is not None or (around is not None and around.rank != 0)
    check_typed(cfg, typed, None if alone else check_together(around))
    place = job_of(cfg)
    for key in ("data_dir", "log_dir"):  # so that a run directory can be used from any working directory
        cfg.paths[key] = os.path.abspath(cfg.paths[key])
    typed = resolve(cfg)  # with what follows them
    trust.allow(typed)
    nodes = read_nodes(typed["launch"], around)
    outer = None if nodes.several else around  # srun's task on each node is that node's agent
    _check_sweep(outer, nodes)
    if place is not None and typed["resume"] is None:
        nodes = replace(nodes, launch_id=place.launch_id)
    if outer is not None and outer.rank != 0:
        with outer:
            received = outer.receive(typed)
            return (None, "") if received is None else (call(job, received), received["paths"]["run_dir"])
    log_dir = Path(typed["paths"]["log_dir"])
    # The first node makes the directory that the others find; of two commands with resume=auto one starts the run.
    with ExitStack() as held:
        with arriving(log_dir) if nodes.launch_id or typed["resume"] == "auto" else nullcontext():
            run, resolved = find_run(typed, outer, nodes)
            if run is not None:
                refuse(check(resolved, "train", check_together(around), saved="run"))
            elif alone:
                check_typed(cfg, resolve(cfg), check_together(around))
            processes = count_processes(resolved, outer, nodes)
            complete = (
                run is not None and run.complete and not differences(run.config, resolved, rundir.NOT_THE_EXPERIMENT)
            )
            if complete and outer is not None:
                with outer:
                    outer.dismiss(resolved)
            if place is not None and run is not None:
                place.found(run.path)
            if run is not None and complete and not owes_receipt(run, resolved):
                print(f"{run.path} is complete; raise {end_of(run)} to train it further.")
                return run.result.get("objective"), str(run.path)
            fresh = run is None
            if run is not None and not complete:
                run.warn_of_changes()
            recorded = None if run is None else run.known_config["launch"].get("threads")
            threads, reason = choose_threads(resolved["launch"]["threads"], processes, recorded)
            resolved["launch"]["threads"] = threads
            if reason and not complete:
                print(f"CPU threads per process: {threads} ({reason})", flush=True)
            if run is None:
                resolved = pinned(resolved)
                resolved["resume"] = None
                run = rundir.create(
                    log_dir, resolved, kept_words(resolved), outer.launch_id if outer else nodes.launch_id
                )
                if place is not None:
                    place.found(run.path)
            held.enter_context(run.locked(shared=nodes.several))
        if complete:
            print(f"{run.path} is complete but for its receipt, which is measured now.")
            call("lathe.verbs.finalise:complete", resolved)
            return run.result.get("objective"), str(run.path)
        try:
            words = resume_words(resolved) if typed["resume"] not in (None, "auto") else []
            reopened = (
                run.reopened(resolved, words) if not fresh and (run.complete or not nodes.several) else nullcontext()
            )
            if place is not None:  # for what a run reports to its search; no part of its configuration
                resolved = {**resolved, "sweep": {"folder": str(place.folder), "job": place.number}}
            with outer or nullcontext(), reopened:
                if outer is not None:
                    outer.send(resolved)
                result = execute(job, resolved, 1 if outer else processes, resolved["launch"], nodes)
        except FileNotFoundError as error:
            require(run.path.is_dir(), f"{run.path} was moved or removed while its run went on: resume it where it is.")
            raise error
        except BaseException:  # an interrupt and a bug too: a directory that holds nothing is in the way
            if fresh and not run.begun:
                run.remove()
            raise
    return (result or {}).get("objective"), str(run.path)


def check_together(around: Outer | None) -> tuple[Together, ...]:
    """What the keys of a run mean together, beside lathe.config.schema's."""

    def sizes(cfg: dict[str, Any]) -> None:
        nodes = read_nodes(cfg["launch"], around)
        outer = None if nodes.several else around
        _check_sweep(outer, nodes)
        processes = count_processes(cfg, outer, nodes)
        for count in range(nodes.least, nodes.most + 1):
            check_batch_size(cfg, outer.world_size if outer else processes * count)

    return check_compression, _check_direction, sizes


def _check_direction(cfg: dict[str, Any]) -> None:
    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN:
        check_direction(cfg, OmegaConf.to_container(hydra.sweeper), hydra.overrides.hydra)  # type: ignore[arg-type]


def _check_sweep(outer: Outer | None, nodes: Nodes) -> None:
    """What a sweep can't be combined with. A job that submitit has started is one run, though Hydra says that it
    belongs to a sweep.
    """
    hydra = HydraConfig.get()
    sweep, submitted = hydra.mode == RunMode.MULTIRUN, "SUBMITIT_EXECUTOR" in os.environ
    require(
        sweep or hydra.runtime.choices.get("launch") != "slurm",
        "launch=slurm submits the jobs of a sweep: add -m (python train.py -m launch=slurm ...), or use "
        "scripts/slurm/train.sbatch for a single run.",
    )
    if not sweep or submitted:
        return
    require(
        outer is None,
        "A sweep (-m) under torchrun or srun would be run once per rank: start it with python, or sweep outside.",
    )
    require(
        nodes.launch_id is None,
        f"launch.id={nodes.launch_id} names one run, and a sweep (-m) has several: leave launch.id and "
        "launch.nodes out, or sweep outside.",
    )


def launch_on_run(cfg: DictConfig, job: str) -> Any:
    """Runs `job` on a finished or unfinished run directory, `cfg.run`, which it only reads. `job` gets the run's own
    configuration with the device, strategy, precision and evaluation batch that `cfg` asks for in their place, and
    `cfg` itself under `request`.

    Raises:
        UserError: as `launch`.
    """
    try:
        if "export" in cfg:
            name_export(cfg)
        name_checkpoint(cfg)
        request = resolve(cfg)
        check_typed(cfg, request)
        trust.allow(request)
        run = rundir.open_run(request["run"], "run")
        run.warn_of_changes()
        resolved = run.config
        resolved["paths"]["run_dir"] = str(run.path)
        resolved["trainer"] |= request["trainer"]
        resolved["strategy"] = request["strategy"]
        if request.get("precision") is not None:
            resolved["precision"] = request["precision"]
        if request["batch_size"] is not None:
            resolved["data"]["eval_batch_size"] = request["batch_size"]
        data_at(resolved, (request.get("data") or {}).get("folder"))
        resolved["request"] = request
        refuse(check(resolved, saved="parts"))
        nodes = read_nodes(request["launch"])
        alone = not nodes.several and nodes.launch_id is None
        require(
            alone,
            "launch.nodes and launch.id are for training: a job on a run directory takes one machine; leave them out.",
        )
        with stoppable():
            return execute(job, resolved, count_processes(resolved), request["launch"])
    except Exception as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN and not isinstance(error, Stopped):  # as above
            raise
        sys.exit(tell(error))


def check_typed(cfg: DictConfig, resolved: dict[str, Any], together: Sequence[Together] | None = ()) -> None:
    """Holds the configuration of this verb against what its keys take, alone and `together`, and what was typed for
    parts that no table knows against the types of the defaults of the groups that were chosen.

    Raises:
        UserError: with a sentence for each mistake.
    """
    hydra = HydraConfig.get()
    verb, choices, typed = str(hydra.job.config_name), hydra.runtime.choices, typed_words()
    raw, known = OmegaConf.to_container(cfg, resolve=False), key_schemas(resolved, verb)
    if verb in ELSEWHERE and hydra.mode != RunMode.MULTIRUN:
        named = next((item for item in typed if key_of(item) == "paths.log_dir"), None)
        require(named is None, f"{named} has no effect on {verb}.py, which {ELSEWHERE[verb]}: leave it out.")
    own = [key_of(item) for item in typed if key_of(item) not in choices and not item.startswith("~")]
    own = [key for key in own if key not in known]
    defaults = _defaults([item for item in typed if key_of(item) in choices]) if own else {}
    more = [*mistyped(own, resolved, defaults, verb), *idle(typed, resolved)]
    refuse(check(resolved, verb, together, raw, more=more))


def _defaults(groups: list[str]) -> dict[str, Any]:
    """The configuration of these groups; what follows a key that is only typed (`+data.channels=1`) is left open, as
    null.
    """
    tree = compose(config_name=HydraConfig.get().job.config_name, overrides=groups)
    leaves: dict[str, Any] = flatten(OmegaConf.to_container(tree))
    for key, value in leaves.items():
        if isinstance(value, str) and ("${" in value or value == "???"):
            try:
                found = OmegaConf.select(tree, key)
                leaves[key] = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
            except OmegaConfBaseException:
                leaves[key] = None
    return leaves


def check_batch_size(cfg: dict[str, Any], world: int) -> None:
    """The processes have to fill the strategy's sizes, and the global batch has to divide by the data replicas.

    Raises:
        UserError: it does not; the sentence names both keys.
    """
    documents = "max_batch_size" in cfg["data"]  # batches of any size, filled up to equal shares
    batch_size, replicas = None if documents else cfg["data"].get("batch_size"), data_replicas(cfg["strategy"], world)
    shared = f"trainer.devices x trainer.num_nodes = {world}"
    require(
        batch_size is None or batch_size % replicas == 0,
        f"data.batch_size={batch_size} is the global batch and does not divide by "
        f"{shared if replicas == world else f'the {replicas} data replicas that {shared} makes'}: choose a multiple "
        f"of {replicas}.",
    )
