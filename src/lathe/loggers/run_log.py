"""What a run records of itself: facts for loggers and run.log, both without secrets."""

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lathe.config.override_parsing import key_of
from lathe.errors import UserError
from lathe.files import open_plain

NAME = "run.log"
# groups whose choices describe a run, the most important first
GROUPS = [
    *("experiment", "model", "data", "task", "optimizer", "scheduler", "compression"),
    *("strategy", "precision", "compile", "performance", "trainer", "callbacks", "debug"),
]
ALWAYS = ("seed", "optimizer.lr", "data.batch_size", "trainer.max_epochs")  # also without an override
WHERE = ("paths", "launch", "logger")  # keys of the directory and the launch
HIDDEN = "hidden"
LEFT_OUT = ("hydra", "resume", "trusted")  # keys of the command, not of the run
SECRET = {"token", "password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey"}
SECRET_KEYS = ("api_key", "access_key", "private_key", "secret_key", "auth_key")
ADDRESS = re.compile(r"callbacks\.[^.]+\.url")  # the address is a secret
LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
SHORTEST = 6  # least characters of a secret in the environment: shorter values are words like "true"


def run_facts(leaves: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return a configuration's `leaves` without the command's keys, and with secrets hidden.

    Secrets are the values of keys named like one (token, password, api_key), the values of environment variables with
    such a name, addresses that callbacks post to, and logins in addresses.
    """
    secrets = secrets_in({}, environment)
    return {key: _shown(key, value, secrets) for key, value in leaves.items() if key.partition(".")[0] not in LEFT_OUT}


def main_facts(facts: Mapping[str, Any], choices: Mapping[str, Any], typed: Sequence[str]) -> dict[str, Any]:
    """Return the `facts` in which runs differ: group choices, `ALWAYS`, overrides, and the run directory.

    A group whose node was written out in full is "custom".
    """
    overrides = {key_of(override): override.partition("=")[2] for override in typed}
    groups = {group: str(overrides.get(group, choices.get(group) or "null")) for group in GROUPS}
    keys = [key for key in overrides if key not in GROUPS and key.partition(".")[0] not in WHERE]
    return {
        **{group: "custom" if "{" in value else value for group, value in groups.items() if value != "null"},
        **{key: facts[key] for key in ALWAYS if key in facts},
        **{leaf: facts[leaf] for key in keys for leaf in facts if leaf == key or leaf.startswith(f"{key}.")},
        "run_dir": facts.get("paths.run_dir"),
    }


def secrets_in(leaves: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> set[str]:
    """Return the values that `run_facts` hides, except logins in addresses."""
    configured = [str(value) for key, value in leaves.items() if value is not None and _hidden(key)]
    values = [*configured, *(value for name, value in environment.items() if _secret(name))]
    return {value for value in values if len(value) >= SHORTEST}


def _hidden(key: str) -> bool:
    return _secret(key.rpartition(".")[2]) or ADDRESS.fullmatch(key) is not None


def _secret(name: str) -> bool:
    word = name.lower().replace("-", "_")
    return bool(set(word.split("_")) & SECRET) or any(key in word for key in SECRET_KEYS)


def _shown(key: str, value: Any, secrets: set[str]) -> Any:
    if value is not None and _hidden(key):
        return HIDDEN
    if isinstance(value, str):
        return HIDDEN if value in secrets else LOGIN.sub(HIDDEN, value)
    if isinstance(value, (list, tuple)):
        return [_shown(key, item, secrets) for item in value]
    if isinstance(value, dict):
        return {name: _shown(str(name), item, secrets) for name, item in value.items()}
    return value


class _LogFile(logging.FileHandler):
    """Append to a plain file, with secrets hidden; report a write error once."""

    def __init__(self, path: Path, secrets: set[str]) -> None:
        super().__init__(path, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        patterns = sorted(map(re.escape, secrets), key=len, reverse=True)
        self.hidden = re.compile("|".join([LOGIN.pattern, *patterns]))
        self.has_failed = False

    def format(self, record: logging.LogRecord) -> str:
        return self.hidden.sub(HIDDEN, super().format(record))

    def _open(self) -> Any:
        return open_plain(Path(self.baseFilename), "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.has_failed:
            self.has_failed = True
            print(f"Note: {self.baseFilename} can't be written ({sys.exception()}): it ends here.", file=sys.stderr)

    def close(self) -> None:
        with suppress(OSError):  # the disk may be full
            super().close()


@contextmanager
def run_log(run_dir: Path, leaves: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Append to run.log in rank 0, until the run ends.

    It has records of `logging` (from INFO on, unless another level is set), warnings, and the error that ends the run.
    Secrets of `leaves`, the flat configuration, and of the `environment` are hidden, as in loggers.
    """
    if getattr(rank_zero_only, "rank", 0) != 0:
        yield
        return
    file = _LogFile(run_dir / NAME, secrets_in(leaves, environment))
    root = logging.getLogger()
    names = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.profilers")
    silent = [logging.getLogger(name) for name in names]
    homes = [root, *(logger for logger in silent if not logger.propagate)]
    # without handlers logging prints warnings with this one, which a file handler would replace
    shown = [] if root.handlers or logging.lastResort is None else [logging.lastResort]
    level, before = root.level, warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any, **more: Any
    ) -> None:
        before(message, category, filename, lineno, *rest, **more)
        write("warnings", logging.WARNING, f"{category.__name__}: {message} ({filename}:{lineno})")

    def write(name: str, level: int, message: str, error: BaseException | None = None) -> None:
        stack = None if error is None else (type(error), error, error.__traceback__)
        file.handle(logging.LogRecord(name, level, "", 0, message, None, stack))

    for home in homes:
        home.addHandler(file)
    for handler in shown:
        root.addHandler(handler)
    if shown and level > logging.INFO:  # the default level
        root.setLevel(logging.INFO)
    warnings.showwarning = show
    try:
        write("lathe", logging.INFO, f"process {os.getpid()} begins")
        yield
        write("lathe", logging.INFO, f"process {os.getpid()} has ended")
    except BaseException as error:
        write("lathe", logging.ERROR, str(error) or repr(error), None if isinstance(error, UserError) else error)
        raise
    finally:
        warnings.showwarning = before
        root.setLevel(level)
        for handler in shown:
            root.removeHandler(handler)
        for home in homes:
            home.removeHandler(file)
        file.close()


@contextmanager
def ended_on_error(run_dir: Path) -> Iterator[None]:
    """End the W&B run that a failed run leaves open in this process, and mark it as failed."""
    try:
        yield
    except BaseException:
        package = sys.modules.get("wandb")
        if package is not None and package.run is not None and package.run.id == run_dir.name:
            with suppress(Exception):  # the run's own error is raised
                package.finish(exit_code=1)
        raise
