"""Run metadata for loggers: group choices, overrides and the resolved configuration, without secrets."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lathe.config.override_parsing import key_of

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
    secrets = _of_environment(environment)
    return {key: _shown(key, value, secrets) for key, value in leaves.items() if key.partition(".")[0] not in LEFT_OUT}


def main_facts(facts: Mapping[str, Any], choices: Mapping[str, Any], typed: Sequence[str]) -> dict[str, Any]:
    """Return the `facts` in which runs differ: group choices, `ALWAYS`, overrides, and the run directory.

    A group whose node was written out in full is "custom".
    """
    words = {key_of(word): word.partition("=")[2] for word in typed}
    chosen = {group: str(words.get(group, choices.get(group) or "null")) for group in GROUPS}
    keys = [key for key in words if key not in GROUPS and key.partition(".")[0] not in WHERE]
    return {
        **{group: "custom" if "{" in value else value for group, value in chosen.items() if value != "null"},
        **{key: facts[key] for key in ALWAYS if key in facts},
        **{leaf: facts[leaf] for key in keys for leaf in facts if leaf == key or leaf.startswith(f"{key}.")},
        "run_dir": facts.get("paths.run_dir"),
    }


def secrets_in(leaves: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> set[str]:
    """Return the values that `run_facts` hides, except logins in addresses."""
    typed = {str(value) for key, value in leaves.items() if value is not None and _hidden(key)}
    return _of_environment(environment) | {value for value in typed if len(value) >= SHORTEST}


def _of_environment(environment: Mapping[str, str]) -> set[str]:
    return {value for name, value in environment.items() if _secret(name) and len(value) >= SHORTEST}


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
