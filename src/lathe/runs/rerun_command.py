"""Shell commands about a run directory, as the user would type them in this folder. Imports no torch."""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lathe.config.compression_plan import methods
from lathe.config.override_parsing import as_typed
from lathe.errors import UserError
from lathe.trust import carried
from lathe.trust.safe_yaml import is_signed, read_yaml

ENDS = ("max_epochs", "max_steps", "max_time")  # keys of the Trainer
CONFIG_DIR = "LATHE_CONFIG_DIR"  # the variable with the folder of --config-dir


def script_path(name: str) -> str:
    """Return the path of the script `name` of this project, relative to the folder of the running command."""
    running = Path(sys.argv[0])
    root = running.parent
    if root.resolve().name == "scripts":
        root = root.parent if root.name == "scripts" else root / ".."
    is_elsewhere = (root / "train.py").is_file() and (root / name).is_file() and root.resolve() != Path.cwd()
    return os.path.normpath(root / name) if is_elsewhere else name


def train_command() -> list[str]:
    """Return the beginning of a command that trains, with the --config-dir of this one."""
    folder = os.environ.get(CONFIG_DIR)
    return ["python", script_path("train.py"), *(["--config-dir", folder] if folder else [])]


def run_command(script: str, key: str, run: str | Path, config: Mapping[str, Any], *more: str) -> str:
    """Return the shell command that runs `script` on the directory `run`, which has this `config`."""
    return shlex.join(["python", script_path(script), *run_overrides(key, run, config), *more])


def run_overrides(key: str, run: str | Path, config: Mapping[str, Any]) -> list[str]:
    """Return the overrides that give `run` to a command at `key`, not yet quoted for a shell."""
    names = trusted_names(run, config)
    return [f"{key}={quote_value(str(run))}", *([f"trusted=[{','.join(map(quote_value, names))}]"] if names else [])]


def trusted_names(run: str | Path, config: Mapping[str, Any]) -> list[str]:
    """Return the names that a later command on `run` must list in `trusted`.

    They are in its `config` or in those of its teachers, this user has not signed them, and this process may build them
    because its own command names or trusts them.
    """
    unsigned = [*([] if is_signed(Path(run)) else [config]), *_teacher_configs(config)]
    if not unsigned:
        return []
    from lathe.trust.allowlist import findings

    trusted, typed = carried()
    names = set()
    for saved in unsigned:
        if asked := list(findings(saved, [], {})):
            refused = {(found.key, found.name) for found in findings(saved, trusted, typed)}
            names |= {found.name for found in asked if (found.key, found.name) not in refused}
    return sorted(names)


def _teacher_configs(config: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the unsigned configurations of the teachers of a run, which are opened with it."""
    for node in methods(config.get("compression") or {}).values():
        teachers = node.get("teacher")
        for path in teachers if isinstance(teachers, list) else [teachers]:
            file = Path(str(path)) / "config.yaml"
            with suppress(UserError, OSError):  # an error is raised where the teacher is opened
                if isinstance(path, str) and file.is_file() and not is_signed(file.parent):
                    yield read_yaml(file, str(path))


def quote_value(text: str) -> str:
    """Return `text` as the value of an override, quoted if Hydra's grammar requires it."""
    return text if re.fullmatch(r"[\w./-]+", text, re.ASCII) else as_typed(text)


def rerun_overrides(words: list[str], leaves: dict[str, Any]) -> list[str]:
    """Return the overrides of another run like the one with the overrides `words` and the dotted config `leaves`.

    Overrides that name the one run are left out. The runs that it started or learned from have their resolved paths,
    since logs/latest may be another run now.
    """
    kept = []
    for word in drop_overrides(last_values(words), "resume", "sweep", "hydra", "launch.id", "paths.run_dir"):
        key = _key(word)
        path = leaves.get(key) if key.endswith(("ckpt_path", "teacher")) else None
        kept.append(f"{word.partition('=')[0]}={quote_value(path)}" if isinstance(path, str) else word)
    return kept


def drop_overrides(words: list[str], *keys: str) -> list[str]:
    """Return the `words` that set nothing at `keys` or below."""
    return [
        word
        for word in words
        if not any(_key(word) == key or _key(word).startswith((f"{key}.", f"{key}/")) for key in keys)
    ]


def last_values(words: list[str]) -> list[str]:
    """Return the overrides without those that a later one replaces, as a resume does."""
    return [
        word
        for i, word in enumerate(words)
        if word.partition("=")[0] not in {w.partition("=")[0] for w in words[i + 1 :] if w[0] not in "+~"}
    ]


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0].partition("@")[0]
