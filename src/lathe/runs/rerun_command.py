"""Shell commands about a run directory, as the user would type them in this folder. Imports no torch."""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from lathe.config.override_parsing import as_typed, key_of

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


def run_command(script: str, key: str, run: str | Path, *more: str) -> str:
    """Return the shell command that runs `script` on the directory `run`, which it takes as `key`."""
    return shlex.join(["python", script_path(script), f"{key}={quote_value(str(run))}", *more])


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
        key = key_of(word)
        path = leaves.get(key) if key.endswith(("ckpt_path", "teacher")) else None
        kept.append(f"{word.partition('=')[0]}={quote_value(path)}" if isinstance(path, str) else word)
    return kept


def drop_overrides(words: list[str], *keys: str) -> list[str]:
    """Return the `words` that set nothing at `keys` or below."""
    return [
        word
        for word in words
        if not any(key_of(word) == key or key_of(word).startswith((f"{key}.", f"{key}/")) for key in keys)
    ]


def last_values(words: list[str]) -> list[str]:
    """Return the overrides without those that a later one replaces, as a resume does."""
    return [
        word
        for i, word in enumerate(words)
        if word.partition("=")[0] not in {w.partition("=")[0] for w in words[i + 1 :] if w[0] not in "+~"}
    ]
