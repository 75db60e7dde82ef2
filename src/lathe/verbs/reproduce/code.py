"""Check out the commit and diff of a run's environment.json in a temporary folder. Imports no torch."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lathe import files
from lathe.errors import UserError, require
from lathe.runs.environment import describe_environment


@dataclass(frozen=True)
class Code:
    """A project's `folder`, its state in words, and notes on what may be missing from it."""

    folder: Path
    commit: str | None
    diff: str | None
    said: str
    notes: tuple[str, ...] = field(default=())


def project(script: str) -> Path:
    """Return this project's root; raise UserError if Lathe is installed without train.py."""
    folder = Path(__file__).resolve().parents[4]
    require((folder / "train.py").is_file(), f"{script} needs a clone of the project, with its train.py.")
    return folder


@contextmanager
def code_of(environment: dict[str, Any], choice: str, where: str) -> Iterator[Code]:
    """Yield the recorded code in a temporary checkout, or with `choice` current the present code.

    Raises UserError, with `where` as its beginning, if the code is not recorded or not available.
    """
    root, here = project("reproduce.py"), describe_environment()
    commit, diff = environment.get("git_commit"), environment.get("git_diff")
    if choice == "current":
        same = (commit, diff) == (here["git_commit"], here["git_diff"]) and commit is not None
        said = f"as it is here{', which is what the run recorded' if same else ''}"
        yield Code(root, here["git_commit"], here["git_diff"], said)
        return
    way = "add code=current to run the code as it is here."
    known = isinstance(commit, str) and len(commit) == 40 and commit.isalnum() and isinstance(diff, str | None)
    require(known, f"{where}: its environment.json records no commit, so its code is not known; {way}")
    assert isinstance(commit, str)
    if (commit, diff or "") == (here["git_commit"], here["git_diff"] or ""):
        yield Code(root, commit, diff, f"as it is here, commit {commit[:12]}{_changed(diff)}, as recorded")
        return
    require(
        here["git_commit"] is not None and _git(root, "cat-file", "-e", f"{commit}^{{commit}}").returncode == 0,
        f"{where}: its commit {commit[:12]} is not in this repository: fetch it (git fetch --all), or {way}",
    )
    with files.scratch() as folder:
        tree = folder / "code"
        made = _git(root, "worktree", "add", "--detach", "--quiet", str(tree), commit)
        require(made.returncode == 0, f"{where}: git can't check out its commit: {_first(made.stderr)}; {way}")
        try:
            _apply(tree, diff or "", f"{where}: the diff in its environment.json", way)
            prefix = _git(root, "rev-parse", "--show-prefix").stdout.decode().strip()
            said = f"commit {commit[:12]}{_changed(diff)}, as recorded, in a folder of its own"
            yield Code(tree / prefix, commit, diff, said, tuple(_unknown_to_git(root)))
        finally:
            _git(root, "worktree", "remove", "--force", str(tree))
            _git(root, "worktree", "prune")


def _apply(tree: Path, diff: str, what: str, way: str) -> None:
    if not diff.strip():
        return
    done = _git(tree, "apply", "--whitespace=nowarn", "-", given=f"{diff}\n".encode(errors="surrogateescape"))
    require(done.returncode == 0, f"{what} can't be applied to its commit ({_first(done.stderr)}): {way}")


def _unknown_to_git(root: Path) -> Iterator[str]:
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "--", "src", "configs", "train.py")
    names = [os.fsdecode(name) for name in listed.stdout.splitlines()]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{more} is not known to git, so it was recorded nowhere and the run is made without it"


def _changed(diff: str | None) -> str:
    return f" with {len(diff.splitlines())} lines of uncommitted diff" if diff else ""


def _first(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("fatal: ").removeprefix("error: ") if lines else "it does not say why"


def _git(folder: Path, *arguments: str, given: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["git", *arguments], cwd=folder, input=given, capture_output=True)  # noqa: S603, S607
    except OSError as error:
        raise UserError("git can't be started, which brings the recorded code back: add code=current.") from error
