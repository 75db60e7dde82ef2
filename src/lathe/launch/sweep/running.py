"""A sweep from its command to its last job: taken up where the same command was cut short, or begun."""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from omegaconf import DictConfig, ListConfig, OmegaConf

from lathe import files
from lathe.config.override_parsing import key_of
from lathe.config.resolve import resolve
from lathe.config.schema import key_schemas, problems, training_commands
from lathe.config.validate import check
from lathe.config.values import is_valid, shown
from lathe.errors import UserError, refuse, require
from lathe.launch.external_launch import detect_external_launch
from lathe.launch.multi_node import read_nodes
from lathe.launch.sweep.context import Context
from lathe.launch.sweep.devices import slots_of
from lathe.launch.sweep.jobs import was_pruned
from lathe.launch.sweep.local import run_here
from lathe.launch.sweep.place import ENDED, Job, SweepDir, create_sweep, find_sweep, identity_of
from lathe.launch.sweep.plan import Listed, own_words, planned
from lathe.launch.sweep.search import Search
from lathe.runs.rerun_command import run_command

# In place of this launcher, which runs a job after the other in one process, stands the queue here.
FORKS = sys.platform.startswith("linux")  # elsewhere a fork of what has imported torch is not safe
BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
WITHOUT: dict[str, Any] = {
    "axes": None,
    "runs": None,
    "remove": None,
    "repeats": None,
    "jobs": "auto",
    "retries": 0,
    "silence": 3600,
    "resume": None,
}


def run_sweep(context: Context, params: dict[str, Any], arguments: Sequence[str]) -> list[Job]:
    """Runs the jobs of a sweep, in slots of this machine or through another launcher of Hydra's. `params` are values by
    key beside those in `arguments`, the overrides that were typed.

    Raises:
        UserError: the sweep can't be run, or jobs failed.
        Stopped: a signal ended it.
    """
    require(
        isinstance(params, Mapping),
        f"hydra.sweeper.params={params}: expected values by key, as in 'hydra.sweeper.params={{seed: \"1,2,3\"}}'.",
    )
    options = _options(context)
    _check_alone(context)
    _, words = own_words(arguments)
    here = FORKS and context.config.hydra.launcher.get("_target_") == BASIC
    require(
        here or FORKS or options["jobs"] in ("auto", 1),
        f"sweep.jobs={options['jobs']}: several jobs at a time need Linux: leave it out.",
    )
    slots = slots_of(options["jobs"], context.config.trainer) if here else []
    source = _source(context, words, params, options)
    identity = identity_of(arguments, str(context.config.get("name")), options)
    log_dir = Path(str(context.config.paths.log_dir)).absolute()
    found = find_sweep(log_dir, options["resume"], identity)
    folder = found or create_sweep(log_dir, identity)
    try:
        source.prepare(folder)
    except UserError:
        if found is None:  # the next command should not take up what has never begun
            files.remove(folder.path)
        raise
    already = sum(job.state in ENDED for job in folder.jobs())
    print(f"{f'Taking up {folder.path}, {already} done' if found else folder.path}: {source.total} jobs", flush=True)
    if here:
        run_here(context, folder, source, slots, options)
    else:
        _through_launcher(context, folder, source, options["jobs"])
    source.concluded()
    return _concluded(folder, source)


def _options(context: Context) -> dict[str, Any]:
    """What the group sweep says.

    Raises:
        UserError: a key lacks a value, or has one of another kind.
    """
    if context.config.get("sweep") is None:  # a sweep file of the user's that names hydra.sweeper.params
        options = WITHOUT
    else:
        options = WITHOUT | resolve(OmegaConf.masked_copy(context.config, ["sweep"]))["sweep"]
    refuse(sentence for _, sentence in problems({"sweep": options}, "train", saved=True))
    for key in ("folder", "job"):
        require(options.get(key) is None, f"sweep.{key}={options.get(key)} is filled in for a job: leave it out.")
    return options


def _source(context: Context, words: list[str], params: dict[str, Any], options: dict[str, Any]) -> Listed | Search:
    """Where the jobs come from."""
    jobs = planned(words, options, params, context.loader)
    if options.get("space") is None:
        composed = [context.composed(job) for job in jobs]  # what Hydra refuses is told before any job
        _check_lists(composed[0] if composed else None, words)
        refuse(_in_every_job(composed))
        return Listed(jobs)
    require(
        len(jobs) == 1,
        f"a search draws the values that sweep.space names, and {len(jobs)} combinations of others were typed: move "
        "them there, run each trial with all of them by sweep.repeats={seed: [1, 2, 3]}, or start a search for each.",
    )
    return Search(context, jobs[0], options)


def _in_every_job(jobs: Sequence[DictConfig]) -> list[str]:
    """A sentence for each mistake that all jobs would end with. Those of some of them cost these alone, and are told
    by them.
    """
    shared: list[str] | None = None
    for job in jobs:
        verb = str(job.hydra.job.config_name)
        raw = OmegaConf.masked_copy(job, [str(key) for key in job if key != "hydra"])
        try:
            cfg = resolve(raw)
            # a run that is continued says itself what it is made of
            together = None if cfg.get("resume") is not None else ()
            found = check(cfg, verb, together, OmegaConf.to_container(raw)) if verb in training_commands() else []
        except UserError as error:
            found = [str(sentence) for sentence in error.args]
        shared = found if shared is None else [sentence for sentence in shared if sentence in found]
        if not shared:
            break
    return shared or []


def _check_lists(job: DictConfig | None, words: Sequence[str]) -> None:
    """Raises UserError where a list was typed for a key that takes one value of it: in a sweep, one for each job."""
    if job is None:
        return
    typed = {key_of(word): word for word in words if re.search(r"=\[.*\]$", word)}
    cfg = OmegaConf.to_container(OmegaConf.masked_copy(job, [str(key) for key in job if key != "hydra"]), resolve=False)
    known = key_schemas(cfg, "train") if typed else {}  # type: ignore[arg-type]  # a group of keys
    for key, word in typed.items():
        found, schema = OmegaConf.select(job, key), known.get(key)
        if schema is None or not isinstance(found, ListConfig) or not found or is_valid(list(found), schema):
            continue
        require(
            not all(is_valid(item, schema) for item in found),
            f"{word}: a list in brackets is one value; a sweep over its items is written without them, "
            f"{key}={','.join(map(shown, found))}.",
        )


def _check_alone(context: Context) -> None:
    """Raises UserError for what a sweep can't be combined with."""
    require(
        detect_external_launch() is None,
        "A sweep (-m) under torchrun or srun would be run once per rank: start it with python, or sweep outside.",
    )
    if context.config.hydra.runtime.choices.get("launch") == "slurm":  # whose name is the job's
        return
    launch_id = read_nodes(OmegaConf.to_container(context.config.launch, resolve=True)).launch_id  # type: ignore[arg-type]
    require(
        launch_id is None,
        f"launch.id={launch_id} names one run, and a sweep (-m) has several: leave launch.id and launch.nodes out, or "
        "sweep outside.",
    )


def _through_launcher(context: Context, folder: SweepDir, source: Listed | Search, at_once: int | str) -> None:
    """Hands the jobs to a launcher of Hydra's, such as submitit's: those of a list all at once, those of a search
    sweep.jobs at a time.
    """
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=context.hydra, task_function=context.task, config=context.config
    )
    jobs = [job for job in folder.jobs() if job.state not in ENDED and (source.again or job.state != "failed")]
    most = at_once if isinstance(at_once, int) else 1
    while jobs := jobs or [job for _ in range(most) if (job := source.more(folder)) is not None]:
        _launched(launcher, context, folder, source, jobs)
        jobs = []


def _launched(launcher: Any, context: Context, folder: SweepDir, source: Listed | Search, jobs: list[Job]) -> None:
    for job in jobs:
        folder.forget_run(job)
        folder.save(job)
    returned = launcher.launch([context.words_of(folder, job) for job in jobs], initial_job_idx=0)
    for job, result in zip(jobs, returned, strict=True):
        job.run_dir, job.tries = folder.job(job.number).run_dir, job.tries + 1
        try:
            value = result.return_value
            job.state, job.objective, job.sentence = "complete", None if value is None else float(value), None
        except Exception as error:
            job.state, job.sentence = "failed", " ".join(str(error).split())[:500] or type(error).__name__
        if job.state == "complete" and was_pruned(job):
            job.state = "pruned"
        source.told(job)
        folder.save(job)


def _concluded(folder: SweepDir, source: Listed | Search) -> list[Job]:
    """Says how the jobs have ended, and marks the sweep as done if all are. Those of a list that failed are tried
    again; the trials of a search are counted.

    Raises:
        UserError: some have failed; of a search all trials.
    """
    jobs = folder.jobs()
    failed = [job for job in jobs if job.state == "failed"]
    left = sum(job.state not in (*ENDED, "failed") for job in jobs) + source.unfinished(folder)
    if not left and not (source.again and failed):
        folder.finish()
    if left:
        print(f"{left} jobs are left to other processes that are at this sweep.")
    else:
        print(f"Next:\n  {run_command('scripts/report.py', 'runs', folder.path, {})}")
    trials = {job.of_trial for job in jobs}
    if failed and (source.again or trials == {job.of_trial for job in failed}):
        again = "The same command tries them again, and keeps the others."
        way = again if source.again else "No trial is left to go by."
        told = str(failed[0].sentence)
        ended = told if told.endswith("?") else f"{told.rstrip('.')}."
        raise UserError(
            f"{len(failed)} of {len(jobs)} jobs failed, the first of them ({failed[0].label}) with: {ended} {way}"
        )
    return jobs
