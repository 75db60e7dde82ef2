"""The command `python scripts/reproduce.py`. Imports torch only when a run is repeated."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from lathe import files
from lathe.config.compression_plan import methods
from lathe.config.quoting import as_typed
from lathe.config.resolve import set_data_folder
from lathe.errors import UserError, require
from lathe.loggers.lines import read_lines
from lathe.runs import rundir
from lathe.runs.environment import describe_environment
from lathe.runs.rundir import RunDir
from lathe.verbs.reproduce.code import Code, code_of
from lathe.verbs.runs.places import differing_environments
from lathe.verbs.runs.table import printable

ENDS = ("trainer.max_epochs", "trainer.max_steps")
DIFFERENT = 3  # exit code for different results; 1 is an error, as in all commands


def reproduce(request: dict[str, Any]) -> int:
    """Repeat the run with its recorded code, compare weights and metrics, and return the exit code."""
    trusted = list(request.get("trusted") or [])
    run = rundir.open_run(request["run"], "run", trusted)
    check(run, f"run={request['run']}")
    if request["output"] is not None:
        folder = Path(request["output"]).resolve().parent
        require(folder.is_dir(), f"output={request['output']}: its folder does not exist.")
        require(not Path(request["output"]).is_dir(), f"output={request['output']} is a folder: name a file.")
        # before training
        require(os.access(folder, os.W_OK), f"output={request['output']}: its folder can't be written to.")
        files.require_file(Path(request["output"]))
    _check_checkpoints(run)
    with code_of(run.environment, request["code"], f"run={request['run']}") as code:
        print(f"The code is {code.said}.", flush=True)
        again = begin(run, request, code)
        train(again, code, trusted, run.environment)
        found = report(run, again, code)
    print(show(found))
    if request["output"] is not None:
        files.write_atomically(files.followed(Path(request["output"])), json.dumps(found, indent=2) + "\n")
    return 0 if found["reproduced"] else DIFFERENT


def check(run: RunDir, where: str) -> None:
    """Raise UserError for a run that can't be compared, or that one machine can't repeat."""
    require(run.complete, f"{where} is not complete, so there is nothing to compare with: resume={run.path} ends it.")
    config = run.config
    require(
        "pruned" not in run.result,
        f"{where} was ended early by its search, which a run by itself does not know of: take a complete one.",
    )
    read_lines(run.path / "metrics.csv")  # reports damage before training
    nodes = config["trainer"].get("num_nodes", 1)
    require(nodes == 1, f"{where} was trained on {nodes} machines (trainer.num_nodes), and this is one.")
    for key, path in _started_from(config):
        require(os.path.exists(path), f"{where} needs {key}={path}, which is not there any more: put it back.")


def _check_checkpoints(run: RunDir) -> None:
    """Raise UserError for a damaged checkpoint, before training."""
    from lathe.verbs.reproduce import compared  # imports torch, which earlier errors don't need

    compared.checkpoints(run)


def _started_from(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the files and runs that a run started from or was distilled from, by key."""
    found = [("ckpt_path", config.get("ckpt_path")), ("model.pretrained", config["model"].get("pretrained"))]
    for name, node in methods(config.get("compression") or {}).items():
        teachers = node.get("teacher")
        for teacher in teachers if isinstance(teachers, list) else [teachers]:
            path = teacher.get("weights") if isinstance(teacher, dict) else teacher
            found.append((f"compression.{name}.teacher", path))
    return [(key, path) for key, path in found if isinstance(path, str) and os.path.isabs(path)]


def begin(run: RunDir, request: dict[str, Any], code: Code) -> RunDir:
    """Create a run directory with the run's own resolved configuration."""
    config = run.plain("config.yaml")  # as written: older code does not know newer names
    log_dir = Path(request["paths"]["log_dir"]).absolute()
    config["paths"]["log_dir"] = str(log_dir)
    set_data_folder(config, request["data"]["folder"])
    typed = run.typed if (run.path / "overrides.yaml").is_file() else []
    again = rundir.create(log_dir, config, typed, signed=run.signed)
    environment = {**describe_environment(), "git_commit": code.commit, "git_diff": code.diff}
    files.write_atomically(again.path / "environment.json", json.dumps(environment, indent=2) + "\n")
    return again


def train(again: RunDir, code: Code, trusted: list[str], recorded: dict[str, Any]) -> None:
    """Train the run in a subprocess, with the recorded thread counts; raise UserError if it fails."""
    words = [f"resume={as_typed(str(again.path))}", *([f"trusted={as_typed(trusted)}"] if trusted else [])]
    paths = [str(code.folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = recorded.get("threads")
    environment = {
        **os.environ,
        **({str(key): str(value) for key, value in threads.items()} if isinstance(threads, dict) else {}),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    with subprocess.Popen([sys.executable, str(code.folder / "train.py"), *words], env=environment) as process:  # noqa: S603
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            ended = process.wait()
        except KeyboardInterrupt:  # the terminal has interrupted the subprocess too
            process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    if ended or not again.complete:
        if not again.begun:
            again.remove()
            raise UserError("The run could not be made once more, as it says above; nothing is left of it.")
        raise UserError(
            f"The run did not come to its end (exit code {ended}), as it says above; it lies at {again.path}."
        )


def report(run: RunDir, again: RunDir, code: Code) -> dict[str, Any]:
    """Return the equal and the different results as plain data."""
    from lathe.verbs.reproduce import compared  # imports torch

    weights, unlike = compared.weights(run, again), compared.metrics(run, again)
    first = compared.first_difference(run, again)
    differ = any(part.get("differ") or "missing" in part for part in weights.values())
    same = not (differ or unlike or first)
    environment = differing_environments(run.environment, again.environment)
    return {
        "reproduced": same,
        "run": str(run.path),
        "again": str(again.path),
        "code": code.said,
        "weights": weights,
        "metrics": unlike,
        "first_difference": first,
        "environment": environment,
        "notes": [*code.notes, *([] if same else reasons(run, bool(environment)))]
        + ([] if weights else ["no checkpoint is left of the run, so that its metrics alone were compared"]),
    }


def reasons(run: RunDir, moved: bool) -> list[str]:
    """Return possible reasons for a different result, from the run's configuration."""
    config = run.known_config
    trainer, found = config["trainer"], []
    if moved:
        found.append("the environment differs, which may be why: another version or processor adds in another order")
    if trainer.get("accelerator") != "cpu" and not trainer.get("deterministic"):
        found.append(
            "on a GPU kernels add in an order of their own; trainer.deterministic=true asks for those that don't"
        )
    if trainer.get("max_time") is not None:
        found.append("trainer.max_time ends a run by the clock")
    if run.environment.get("launch_id") is not None:
        found.append("it was started by an outer launcher, whose number of processes is not known here")
    for word in run.typed if (run.path / "overrides.yaml").is_file() else []:
        key, _, value = word.partition("=")
        if key in ENDS and value != str(trainer.get(key.removeprefix("trainer."))):
            found.append(f"it was trained further after its first end, {word}, which no single run does")
    for key, path in _started_from(config):
        found.append(f"it began with {key}={path}, as that is now")
    return found


def show(found: dict[str, Any]) -> str:
    """Return the report as text."""
    title = "Reproduced: weights and metrics are the same bit for bit." if found["reproduced"] else "Not reproduced."
    lines = [title, f"run          {found['run']}", f"again        {found['again']}", f"code         {found['code']}"]
    for name, part in found["weights"].items():
        lines.append(f"{name:<12} {_said(part)}")
    for key, (mine, theirs) in found["metrics"].items():
        lines.append(f"result.json  {key}: {mine} -> {theirs}")
    if not found["metrics"]:
        lines.append("result.json  equal, but for what a clock says")
    first = found["first_difference"]
    if first is None:
        lines.append("metrics.csv  equal, but for what a clock says")
    else:
        columns = ", ".join(f"{key} {mine} -> {theirs}" for key, (mine, theirs) in list(first["columns"].items())[:4])
        lines.append(f"metrics.csv  parts at step {first['step']}: {columns}")
    for key, (mine, theirs) in found["environment"].items():
        lines.append(f"environment  {key}: {mine} -> {theirs}")
    lines += [f"note         {note}" for note in found["notes"]]
    return "\n".join(map(printable, lines))


def _said(part: dict[str, Any]) -> str:
    if "missing" in part:
        return f"is not in {part['missing']}"
    if not part["differ"]:
        return f"equal, {part['tensors']} tensors"
    return f"{part['differ']} of {part['tensors']} tensors differ, by at most {part['largest']:.3g}"
