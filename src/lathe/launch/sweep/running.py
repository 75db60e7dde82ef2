"""Runs a sweep from its command to its last job, or resumes it."""

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

# The queue here replaces Hydra's basic launcher, which runs jobs one after another in one process.
FORKS = sys.platform.startswith("linux")  # on other systems, a fork after importing torch is not safe
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
    """Run the jobs of a sweep, in slots of this machine or with another Hydra launcher.

    `params` are values by key in addition to `arguments`, the typed overrides.

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
        if found is None:  # the same command should not resume a sweep that never began
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
    """Return the group sweep; raise UserError for a missing or invalid value."""
    if context.config.get("sweep") is None:  # a user's sweep file with hydra.sweeper.params
        options = WITHOUT
    else:
        options = WITHOUT | resolve(OmegaConf.masked_copy(context.config, ["sweep"]))["sweep"]
    refuse(sentence for _, sentence in problems({"sweep": options}, "train", saved=True))
    for key in ("folder", "job"):
        require(options.get(key) is None, f"sweep.{key}={options.get(key)} is filled in for a job: leave it out.")
    return options


def _source(context: Context, words: list[str], params: dict[str, Any], options: dict[str, Any]) -> Listed | Search:
    """Return the source of the jobs."""
    jobs = planned(words, options, params, context.loader)
    if options.get("space") is None:
        composed = [context.composed(job) for job in jobs]  # Hydra's errors are reported before any job
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
    """Return the mistakes that all jobs would end with. A mistake in some jobs is reported by those jobs."""
    shared: list[str] | None = None
    for job in jobs:
        verb = str(job.hydra.job.config_name)
        raw = OmegaConf.masked_copy(job, [str(key) for key in job if key != "hydra"])
        try:
            cfg = resolve(raw)
            # a resumed run has its own configuration
            together = None if cfg.get("resume") is not None else ()
            found = check(cfg, verb, together, OmegaConf.to_container(raw)) if verb in training_commands() else []
        except UserError as error:
            found = [str(sentence) for sentence in error.args]
        shared = found if shared is None else [sentence for sentence in shared if sentence in found]
        if not shared:
            break
    return shared or []


def _check_lists(job: DictConfig | None, words: Sequence[str]) -> None:
    """Raise UserError if a list was typed for a key that takes one of its items: a sweep needs commas."""
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
    """Raise UserError for what a sweep can't be combined with."""
    require(
        detect_external_launch() is None,
        "A sweep (-m) under torchrun or srun would be run once per rank: start it with python, or sweep outside.",
    )
    if context.config.hydra.runtime.choices.get("launch") == "slurm":  # which names the job itself
        return
    launch_id = read_nodes(OmegaConf.to_container(context.config.launch, resolve=True)).launch_id  # type: ignore[arg-type]
    require(
        launch_id is None,
        f"launch.id={launch_id} names one run, and a sweep (-m) has several: leave launch.id and launch.nodes out, or "
        "sweep outside.",
    )


def _through_launcher(context: Context, folder: SweepDir, source: Listed | Search, at_once: int | str) -> None:
    """Run the jobs with a Hydra launcher, such as submitit's: a list at once, a search in parts of `sweep.jobs`."""
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
    """Print how the jobs ended, and mark the sweep as done if all are.

    Failed jobs of a list are retried by the same command; failed trials of a search count.

    Raises:
        UserError: jobs of a list failed, or all trials of a search.
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
