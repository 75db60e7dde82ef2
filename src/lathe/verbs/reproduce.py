"""Repeat a finished run with its recorded code, and compare weights and metrics bit for bit; imports torch late."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lathe import files
from lathe.config.compression_plan import methods
from lathe.config.override_parsing import as_typed
from lathe.config.resolve import set_data_folder
from lathe.errors import UserError, require
from lathe.loggers.csv_logger import read_lines
from lathe.runs import rundir
from lathe.runs.rundir import RunDir, describe_environment
from lathe.verbs.runs.reader import check_output, differing_environments, printable

if TYPE_CHECKING:
    from torch import Tensor

ENDS = ("trainer.max_epochs", "trainer.max_steps")
NOT_METRICS = ("tags", "notes", "directions")  # of result.json
DIFFERENT = 3  # exit code for different results; 1 is an error, as in all commands
CURRENT = "add code=current to run the code as it is here."


def reproduce(request: dict[str, Any]) -> int:
    """Repeat the run with its recorded code, compare weights and metrics, and return the exit code."""
    trusted, output = list(request.get("trusted") or []), request["output"]
    run = rundir.open_run(request["run"], "run", trusted)
    where = f"run={request['run']}"
    require(run.complete, f"{where} is not complete, so there is nothing to compare with: resume={run.path} ends it.")
    read_lines(run.path / "metrics.csv")  # reports damage before training
    for key, path in _started_from(run.config):
        require(os.path.exists(path), f"{where} needs {key}={path}, which is not there any more: put it back.")
    check_output(output)  # before training
    checkpoints(run)
    with recorded_code(run.environment, request["code"], where) as code:
        print(f"The code is {code.said}.", flush=True)
        again = begin(run, request, code)
        train(again, code, trusted, run.environment)
        comparison = compare(run, again, code)
    print(comparison_text(comparison))
    if output is not None:
        files.write_atomically(files.followed(Path(output)), json.dumps(comparison, indent=2) + "\n")
    return 0 if comparison["reproduced"] else DIFFERENT


def _started_from(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the files and runs that a run started from or was distilled from, by key."""
    paths = [("ckpt_path", config.get("ckpt_path")), ("model.pretrained", config["model"].get("pretrained"))]
    for name, node in methods(config.get("compression") or {}).items():
        teachers = node.get("teacher")
        for teacher in teachers if isinstance(teachers, list) else [teachers]:
            path = teacher.get("weights") if isinstance(teacher, dict) else teacher
            paths.append((f"compression.{name}.teacher", path))
    return [(key, path) for key, path in paths if isinstance(path, str) and os.path.isabs(path)]


# the recorded code


@dataclass(frozen=True)
class Code:
    """A project's `folder`, its state in words, and notes on what may be missing from it."""

    folder: Path
    commit: str | None
    diff: str | None
    said: str
    notes: tuple[str, ...] = ()


def project(script: str) -> Path:
    """Return this project's root; raise UserError if Lathe is installed without train.py."""
    folder = Path(__file__).resolve().parents[3]
    require((folder / "train.py").is_file(), f"{script} needs a clone of the project, with its train.py.")
    return folder


@contextmanager
def recorded_code(environment: dict[str, Any], choice: str, where: str) -> Iterator[Code]:
    """Yield the recorded code in a temporary checkout, or the present one; raise UserError if it is not available."""
    root, current = project("reproduce.py"), describe_environment()
    commit, diff = str(environment.get("git_commit") or ""), str(environment.get("git_diff") or "")
    same = bool(commit) and (commit, diff) == (current["git_commit"], current["git_diff"] or "")
    if choice == "current" or same:
        state = f"as it is here{', which is what the run recorded' if same else ''}"
        yield Code(root, current["git_commit"], current["git_diff"], state)
        return
    known = len(commit) == 40 and commit.isalnum()
    require(known, f"{where}: its environment.json records no commit, so its code is not known; {CURRENT}")
    _git(f"{where}: git fetch --all may bring its commit", root, "cat-file", "-e", f"{commit}^{{commit}}")
    with files.scratch() as folder:
        tree = folder / "code"
        add = ("worktree", "add", "--detach", "--quiet", str(tree), commit)
        _git(f"{where}: git can't check out its commit", root, *add)
        try:
            if diff.strip():
                patch = f"{diff}\n".encode(errors="surrogateescape")
                _git(f"{where}: its diff can't be applied", tree, "apply", "--whitespace=nowarn", "-", stdin=patch)
            prefix = _git(where, root, "rev-parse", "--show-prefix").strip()
            changed = f" with {len(diff.splitlines())} lines of uncommitted diff" if diff else ""
            state = f"commit {commit[:12]}{changed}, as recorded, in a temporary folder"
            others = ("ls-files", "--others", "--exclude-standard", "--", "src", "configs", "train.py")
            names = _git(where, root, *others).splitlines()
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            what = "is not known to git, so it was recorded nowhere and the run is made without it"
            yield Code(tree / prefix, commit, diff, state, (f"{names[0]}{more} {what}",) if names else ())
        finally:
            with suppress(UserError):  # it must not replace the error of the run
                _git(f"{tree} is left", root, "worktree", "remove", "--force", str(tree))
            with suppress(UserError):
                _git(where, root, "worktree", "prune")


def _git(problem: str, folder: Path, *arguments: str, stdin: bytes | None = None) -> str:
    """Run git in a folder and return its output; raise UserError with the `problem` if it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, input=stdin, capture_output=True)  # noqa: S603, S607
    except OSError as error:
        raise UserError(f"git can't be started, which brings the recorded code back: {CURRENT}") from error
    reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    require(done.returncode == 0, f"{problem}: {reason}; {CURRENT}")
    return os.fsdecode(done.stdout)


# the repetition


def begin(run: RunDir, request: dict[str, Any], code: Code) -> RunDir:
    """Create a run directory with the run's own resolved configuration."""
    config = run.plain("config.yaml")  # as written: older code does not know newer names
    log_dir = Path(request["paths"]["log_dir"]).absolute()
    config["paths"]["log_dir"] = str(log_dir)
    set_data_folder(config, request["data"]["folder"])
    again = rundir.create(log_dir, config, _typed(run), signed=run.signed)
    environment = {**describe_environment(), "git_commit": code.commit, "git_diff": code.diff}
    files.write_atomically(again.path / "environment.json", json.dumps(environment, indent=2) + "\n")
    return again


def _typed(run: RunDir) -> list[str]:
    return run.typed if (run.path / "overrides.yaml").is_file() else []


def train(again: RunDir, code: Code, trusted: list[str], recorded: dict[str, Any]) -> None:
    """Train the run in a subprocess, with the recorded thread counts; raise UserError if it fails."""
    overrides = [f"resume={as_typed(str(again.path))}", *([f"trusted={as_typed(trusted)}"] if trusted else [])]
    paths = [str(code.folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = recorded.get("threads")
    threads = {str(key): str(value) for key, value in threads.items()} if isinstance(threads, dict) else {}
    environment = {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)}
    exit_code, _ = run_to_end([str(code.folder / "train.py"), *overrides], env=environment)
    if not again.begun and not again.complete:
        again.remove()
        raise UserError("The run could not be repeated, for the reason above; nothing is left of it.")
    stopped = f"The repetition at {again.path} stopped with exit code {exit_code}, for the reason above."
    require(not exit_code and again.complete, stopped)


def run_to_end(command: list[str], **options: Any) -> tuple[int, str]:
    """Run a Python script in a subprocess, which SIGTERM ends too; return its exit code and its stderr if piped."""
    with subprocess.Popen([sys.executable, *command], text=True, **options) as process:  # noqa: S603
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            errors = process.communicate()[1]
        except KeyboardInterrupt:  # the terminal has interrupted the subprocess too
            process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    return process.returncode, errors or ""


# the comparison


def checkpoints(run: RunDir) -> dict[str, dict[str, "Tensor"]]:
    """Return the weights in a run's best.ckpt and last.ckpt; raise UserError if one is damaged."""
    from lathe.runs.checkpoints import read_checkpoint

    paths = {f"{name}.ckpt": run.path / "checkpoints" / f"{name}.ckpt" for name in ("best", "last")}
    return {name: read_checkpoint(path, Path(name).stem)["state_dict"] for name, path in paths.items() if path.exists()}


def compare(run: RunDir, again: RunDir, code: Code) -> dict[str, Any]:
    """Return the differences between two runs of one configuration as plain data."""
    from lathe.runs.run_discovery import RESULT_TIMES

    mine, theirs = checkpoints(run), checkpoints(again)
    weights: dict[str, dict[str, Any]] = {}
    for name in sorted(mine | theirs):
        if name not in mine or name not in theirs:
            weights[name] = {"missing": str((again if name in mine else run).path)}
            continue
        gaps, keys = [], mine[name].keys() | theirs[name].keys()
        for key in keys:
            a, b = mine[name].get(key), theirs[name].get(key)
            if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
                gaps.append(float("inf"))
            elif (apart := ~((a == b) | ((a != a) & (b != b)))).any():  # NaN equals NaN
                gaps.append(float((a.double() - b.double())[apart].abs().nan_to_num(nan=float("inf")).max()))
        weights[name] = {"tensors": len(keys), "differ": len(gaps), "largest": max(gaps, default=0.0)}
    metrics = {
        key: (run.result.get(key), again.result.get(key))
        for key in sorted(run.result | again.result)
        if key not in NOT_METRICS and not RESULT_TIMES.fullmatch(key.rpartition("/")[2])
    }
    metrics = {key: pair for key, pair in metrics.items() if pair[0] != pair[1]}
    line = first_difference(run, again)
    reproduced = not (metrics or line or any(part.get("differ") or "missing" in part for part in weights.values()))
    environment = differing_environments(run.environment, again.environment)
    notes = [*code.notes, *([] if reproduced else reasons(run, bool(environment)))]
    return {
        "reproduced": reproduced,
        "run": str(run.path),
        "again": str(again.path),
        "code": code.said,
        "weights": weights,
        "metrics": metrics,
        "first_difference": line,
        "environment": environment,
        "notes": notes if weights else [*notes, "no checkpoint is left of the run: only its metrics were compared"],
    }


def first_difference(run: RunDir, again: RunDir) -> dict[str, Any] | None:
    """Return the step and the differing columns of the first differing line of metrics.csv."""
    from lathe.runs.run_discovery import metric_rows

    if not (run.path / "metrics.csv").is_file():
        return None
    nothing: dict[str, str] = {}
    for mine, theirs in itertools.zip_longest(metric_rows(run.path), metric_rows(again.path), fillvalue=nothing):
        names = [key for key in mine | theirs if mine.get(key) != theirs.get(key)]
        if names:
            step = int(mine.get("step") or theirs.get("step") or 0)
            return {"step": step, "columns": {key: (mine.get(key), theirs.get(key)) for key in names}}
    return None


def reasons(run: RunDir, moved: bool) -> list[str]:
    """Return possible reasons for a different result: another environment, or the run's configuration."""
    config = run.known_config
    trainer, notes = config["trainer"], []
    if moved:
        notes.append("the environment differs, which may be why: another version or processor adds in another order")
    if trainer.get("accelerator") != "cpu" and not trainer.get("deterministic"):
        notes.append("GPU kernels may add in any order; trainer.deterministic=true asks for those that don't")
    if trainer.get("max_time") is not None:
        notes.append("trainer.max_time ends a run by the clock")
    for override in _typed(run):
        key, _, value = override.partition("=")
        if key in ENDS and value != str(trainer.get(key.removeprefix("trainer."))):
            notes.append(f"it was trained further after its first end, {override}, which no single run does")
    return [*notes, *(f"it began with {key}={path}, as that is now" for key, path in _started_from(config))]


def comparison_text(data: dict[str, Any]) -> str:
    title = "Reproduced: weights and metrics are the same bit for bit." if data["reproduced"] else "Not reproduced."
    lines = [title, f"run          {data['run']}", f"again        {data['again']}", f"code         {data['code']}"]
    for name, part in data["weights"].items():
        if "missing" in part:
            text = f"is not in {part['missing']}"
        elif part["differ"]:
            text = f"{part['differ']} of {part['tensors']} tensors differ, by at most {part['largest']:.3g}"
        else:
            text = f"equal, {part['tensors']} tensors"
        lines.append(f"{name:<12} {text}")
    lines += [f"result.json  {key}: {mine} -> {theirs}" for key, (mine, theirs) in data["metrics"].items()]
    if not data["metrics"]:
        lines.append("result.json  equal, but for what a clock says")
    first = data["first_difference"]
    columns = list(first["columns"].items())[:4] if first else []
    text = ", ".join(f"{key} {mine} -> {theirs}" for key, (mine, theirs) in columns)
    lines.append(
        f"metrics.csv  parts at step {first['step']}: {text}" if first else "metrics.csv  equal, but for times"
    )
    lines += [f"environment  {key}: {mine} -> {theirs}" for key, (mine, theirs) in data["environment"].items()]
    return "\n".join(map(printable, [*lines, *(f"note         {note}" for note in data["notes"])]))
