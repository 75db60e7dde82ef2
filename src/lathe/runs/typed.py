"""Commands about a run directory, printed so that they do what they say where they are typed."""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lathe.config.compression_plan import methods
from lathe.config.quoting import as_typed
from lathe.errors import UserError
from lathe.trust import carried
from lathe.trust.allowlist import findings
from lathe.trust.safe_yaml import is_signed, read_yaml

ENDS = ("max_epochs", "max_steps", "max_time")  # of a trainer
CONFIG_DIR = "LATHE_CONFIG_DIR"  # the folder of further configuration files that this command was given


def typed_script(name: str) -> str:
    """`name`, a script's path in this project, as whoever typed the command of this process would type it: perhaps from
    another folder."""
    typed = Path(sys.argv[0])
    root = typed.parent
    if root.resolve().name == "scripts":
        root = root.parent if root.name == "scripts" else root / ".."
    elsewhere = (root / "train.py").is_file() and (root / name).is_file() and root.resolve() != Path.cwd()
    return os.path.normpath(root / name) if elsewhere else name


def train_words() -> list[str]:
    """How a command that trains begins here: with the folder that has the choices of this one."""
    folder = os.environ.get(CONFIG_DIR)
    return ["python", typed_script("train.py"), *(["--config-dir", folder] if folder else [])]


def relied_on(run: str | Path, config: Mapping[str, Any]) -> list[str]:
    """The names in the `config` of the directory `run`, and in those of its teachers, that a later command has to list
    in `trusted`: this user has not signed them, and this process builds them only because its own command names or
    trusts them. Names that have not been allowed here are not among them."""
    trusted, typed = carried()
    names = set()
    for read in (*([] if is_signed(Path(run)) else [config]), *_teachers(config)):
        if asked := list(findings(read, [], {})):  # of a run of Lathe's own parts nothing is
            refused = {(found.key, found.name) for found in findings(read, trusted, typed)}
            names |= {found.name for found in asked if (found.key, found.name) not in refused}
    return sorted(names)


def _teachers(config: Mapping[str, Any]) -> Iterator[Any]:
    """The configurations of the runs that one learns from, which are opened with it."""
    for node in methods(config.get("compression") or {}).values():
        teachers = node.get("teacher")
        for path in teachers if isinstance(teachers, list) else [teachers]:
            file = Path(str(path)) / "config.yaml"
            with suppress(UserError, OSError):  # an error is raised where the teacher is opened
                if isinstance(path, str) and file.is_file() and not is_signed(file.parent):
                    yield read_yaml(file, str(path))


def run_words(key: str, run: str | Path, config: Mapping[str, Any]) -> list[str]:
    """The overrides, not yet quoted for a shell, by which a command takes `run`, a directory with this `config`, at
    `key`."""
    names = relied_on(run, config)
    return [f"{key}={value_typed(str(run))}", *([f"trusted=[{','.join(map(value_typed, names))}]"] if names else [])]


def run_command(script: str, key: str, run: str | Path, config: Mapping[str, Any], *more: str) -> str:
    """The line for a shell that runs `script` on `run`."""
    return shlex.join(["python", typed_script(script), *run_words(key, run, config), *more])


def value_typed(text: str) -> str:
    """`text` as the value of an override: in quotes where Hydra's grammar would read more than a word."""
    return text if re.fullmatch(r"[\w./-]+", text, re.ASCII) else as_typed(text)


def without_replaced(words: list[str]) -> list[str]:
    """Those of `words` that no later one gives another value, as a run has them that was resumed with a later end."""
    return [word for at, word in enumerate(words) if word.partition("=")[0] not in _assigned(words[at + 1 :])]


def _assigned(words: list[str]) -> set[str]:
    """The keys to which overrides give a value, neither adding nor leaving one out."""
    return {word.partition("=")[0] for word in words if word[0] not in "+~"}
