"""The security policy for foreign run directories and exports; docs/security.md explains it. Imports no torch.

A saved configuration is checked when it is read, before anything that it names is imported. `trusted` and the names in
the current command hold for this process and its children, which find them in an environment variable.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lathe.errors import require
from lathe.trust import safe_yaml
from lathe.trust.safe_yaml import read_json

__all__ = ["allow", "allow_program", "carried", "names_in", "read_json"]

ENVIRONMENT = "LATHE_TRUSTED"
TRUSTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|\w[\w+.-]*:\S+")  # a package, a name in one, or an address
# Hydra's functions that look a name up instead of calling it.
GETTERS = {f"hydra.utils.{name}" for name in ("get_class", "get_method", "get_object", "get_static_method")}
INIT = re.compile(r"model\.init(?:\[\d+\])?")  # the name of an initialisation of ours, or a dotted path to a function
# Keys with an address that metrics, messages and API keys are sent to, and addresses on this machine.
ADDRESS = re.compile(r"logger\.[^.\[]+\.tracking_uri|callbacks\.[^.\[]+\.url")
LOCAL = re.compile(r"(?:sqlite|file):.*|env:\w+|[^:]*", re.DOTALL)


def allow(cfg: dict[str, Any]) -> None:
    """Remove `trusted` from the configuration of the current command, and allow what it lists and the command names."""
    trusted = cfg.pop("trusted", None) or []
    require(isinstance(trusted, list), f"trusted={trusted!r}: expected a list of packages, such as trusted=[timm].")
    for item in trusted:
        is_name = isinstance(item, str) and TRUSTED.fullmatch(item)
        require(bool(is_name), f"trusted={item!r}: expected the name of a package or of a class in one, such as timm.")
    os.environ[ENVIRONMENT] = json.dumps({"trusted": trusted, "typed": names_in(cfg)})


def allow_program(target: str, folder: Path) -> None:
    """Raise UserError unless `target` is trusted, so that the foreign program in `folder` may be loaded."""
    require(
        target in carried()[0],
        f"target={target}: {folder} is a program that you have not exported here, and loading it runs it; if you trust "
        f"it, add trusted=[{target}], or export the run again.",
    )


def carried() -> tuple[list[str], dict[str, str]]:
    """Return the trusted names, and the names in the current command by their keys."""
    names: dict[str, Any] = json.loads(os.environ.get(ENVIRONMENT) or "{}")
    return names.get("trusted", []), names.get("typed", {})


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


# Signatures. Some exports are programs, and a run's config.yaml may name any class: what this user has not signed is
# loaded only if it is trusted.

FALLBACK = "LATHE_EXPORT_KEY"  # for this process and its children, where the user's folder can't be written to
LENGTH = 32
MARK = b"# signature: "  # begins the last line of a config.yaml


def signature(target: str, file: str, hashes: Any) -> str:
    """Return the keyed hash of an export: its target, the name of its file, sizes and hashes of all its files."""
    return hmac.new(_key(), json.dumps([target, file, hashes], sort_keys=True).encode(), hashlib.sha256).hexdigest()


def made_here(manifest: dict[str, Any]) -> bool:
    """True if this user has written a manifest, whose hashes were compared with the files before."""
    mark = manifest.get("made")
    own = signature(manifest["target"], manifest["file"], manifest["files"])
    return isinstance(mark, str) and hmac.compare_digest(mark.encode(), own.encode())


def signed_config(text: str) -> str:
    """Return the text of a config.yaml with its keyed hash as a comment in the last line."""
    return text + (MARK + _config_hash(text.encode())).decode() + "\n"


def read_signed(path: Path, where: str) -> tuple[Any, bool]:
    """Read YAML as `read_yaml`; also return True if this user has signed the file, and it was not changed since."""
    data = safe_yaml.read_bytes(path, where)
    text, mark, digest = data.rpartition(MARK)
    return safe_yaml.parse_yaml(data, where), bool(mark) and hmac.compare_digest(digest, _config_hash(text) + b"\n")


def _config_hash(text: bytes) -> bytes:
    return hmac.new(_key(), b"config.yaml\n" + text, hashlib.sha256).hexdigest().encode()


def _key() -> bytes:
    path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "lathe" / "export.key"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(LENGTH))
            try:
                os.link(temporary, path)  # atomic; the first of two stays
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
        status, key = path.stat(), path.read_bytes()
        private = not hasattr(os, "getuid") or (
            status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
        )
        if len(key) == LENGTH and private:
            return key
    except (OSError, RuntimeError):  # no home folder, or a read-only disk
        pass
    return bytes.fromhex(os.environ.setdefault(FALLBACK, secrets.token_hex(LENGTH)))
