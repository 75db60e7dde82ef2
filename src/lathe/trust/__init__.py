"""The security policy for foreign run directories and exports; docs/security.md explains it. Imports no torch.

A saved configuration is checked when it is read, before anything that it names is imported. `trusted` and the names in
the current command hold for this process and its children, which find them in an environment variable.
"""

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lathe.errors import UserError, require
from lathe.trust.safe_yaml import printable, read_json, read_yaml

__all__ = ["allow", "allow_program", "carried", "checked_overrides", "names_in", "read_json", "tell_owner"]

ENVIRONMENT = "LATHE_TRUSTED"
TRUSTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|\w[\w+.-]*:\S+")  # a package, a name in one, or an address
# Hydra's functions that look a name up instead of calling it.
GETTERS = {f"hydra.utils.{name}" for name in ("get_class", "get_method", "get_object", "get_static_method")}
INIT = re.compile(r"model\.init(?:\[\d+\])?")  # the name of an initialisation of ours, or a dotted path to a function
# Keys with an address that metrics, messages and API keys are sent to, and addresses on this machine.
ADDRESS = re.compile(r"logger\.[^.\[]+\.tracking_uri|callbacks\.[^.\[]+\.url")
LOCAL = re.compile(r"(?:sqlite|file):.*|env:\w+|[^:]*", re.DOTALL)
_reported: set[str] = set()


def allow(cfg: dict[str, Any]) -> None:
    """Remove `trusted` from the configuration of the current command, and allow what it lists and the command names.

    Raises:
        UserError: `trusted` is not a list of names.
    """
    trusted = cfg.pop("trusted", None) or []
    is_list = isinstance(trusted, list)
    require(is_list, f"trusted={trusted!r}: expected a list of packages, such as trusted=[timm].")
    for item in trusted:
        is_name = isinstance(item, str) and TRUSTED.fullmatch(item)
        require(bool(is_name), f"trusted={item!r}: expected the name of a package or of a class in one, such as timm.")
    os.environ[ENVIRONMENT] = json.dumps({"trusted": trusted, "typed": names_in(cfg)})


def allow_program(target: str, folder: Path) -> None:
    """Allow to load the export in `folder`, a program that this user did not make, if `target` is trusted.

    Raises:
        UserError: it is not.
    """
    require(
        target in carried()[0],
        f"target={target}: {folder} is a program that you have not exported here, and loading it runs it; if you trust "
        f"it, add trusted=[{target}], or export the run again.",
    )


def carried() -> tuple[list[str], dict[str, str]]:
    """Return the trusted names, and the names in the current command by their keys."""
    found: dict[str, Any] = json.loads(os.environ.get(ENVIRONMENT) or "{}")
    return found.get("trusted", []), found.get("typed", {})


def names_in(config: Any) -> dict[str, str]:
    """Return every name in a configuration that is looked up and called, by its key."""
    return {key: name for key, name, _ in walk_names(config, "") if isinstance(name, str)}


def walk_names(node: Any, key: str) -> Iterator[tuple[str, Any, str]]:
    """Give (key, name, use) for all names below a node; the use is component, getter, path, init or address."""
    if isinstance(node, dict):
        target = node.get("_target_")
        is_getter = isinstance(target, str) and target in GETTERS
        if "_target_" in node:
            yield key, target, "getter" if is_getter else "component"
        if is_getter:
            yield join_key(key, "path"), node.get("path"), "path"
        for name, value in node.items():
            yield from walk_names(value, join_key(key, name))
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from walk_names(value, f"{key}[{number}]")
    elif isinstance(node, str):
        if INIT.fullmatch(key) and "." in node:
            yield key, node, "init"
        elif ADDRESS.fullmatch(key) and not LOCAL.fullmatch(node):
            yield key, node, "address"


def join_key(key: str, name: Any) -> str:
    """Return the dotted path of `name` below `key`."""
    return f"{key}.{name}" if key else str(name)


def refuse_findings(found: Sequence[tuple[str, str]], file: str) -> None:
    """Raise UserError for names at keys that are not allowed."""
    if found:
        (key, first), names = found[0], sorted({name for _, name in found})
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UserError(
            f"{file} names `{printable(first)}` at {printable(key)}{more}, which a saved configuration may not build; "
            f"if you trust it, add trusted=[{','.join(map(printable, names[:8]))}]."
        )


def checked_overrides(path: Path, where: str) -> list[str]:
    """Read the overrides of a run from its overrides.yaml.

    Raises:
        UserError: it is not a list of overrides, or one of them changes Hydra itself.
        OSError: it can't be read.
    """
    file = f"{where}: its overrides.yaml"
    require(path.is_file(), f"{file} is missing: use a run directory as Lathe wrote it.")
    content = read_yaml(path, file)
    if not isinstance(content, list) or not all(isinstance(item, str) for item in content):
        raise UserError(f"{file} can't be read as a list of overrides.")
    for item in content:  # a search path imports what it names
        is_hydra = re.match(r"[+~]*hydra\b", item)
        require(not is_hydra, f"{file} holds {item[:80]!r}, which changes Hydra itself: it is not read.")
    return content


def tell_owner(*paths: Path) -> None:
    """Print a note if a directory, or a file in it, belongs to another user of this machine."""
    for path in paths if hasattr(os, "getuid") else ():
        try:
            found = os.lstat(path) if path.is_symlink() else path.stat()
        except OSError:
            continue
        if found.st_uid not in (os.getuid(), 0) and str(path) not in _reported:
            _reported.add(str(path))
            print(f"Note: {path} belongs to another user of this machine.", file=sys.stderr)
            return
