"""Signatures of exports and run directories that this user has made on this machine: keyed hashes, whose key lies in
the user's own folder.

Some exports are programs, and a run's config.yaml may name any class: loading either runs code, and no check can tell a
net from an attack. So files that this user has not signed are loaded only if they are trusted.
"""

import hashlib
import hmac
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

FALLBACK = "LATHE_EXPORT_KEY"  # for this process and those that it starts, where the user's folder can't be written to
LENGTH = 32
MARK = b"# signature: "  # begins the last line of a config.yaml


def signature(target: str, file: str, hashes: Any) -> str:
    """The keyed hash of an export's target, the name of its file, and the sizes and hashes of all its files."""
    return hmac.new(_key(), json.dumps([target, file, hashes], sort_keys=True).encode(), hashlib.sha256).hexdigest()


def made_here(manifest: dict[str, Any]) -> bool:
    """Whether a manifest, whose hashes were compared with the files, is one that this user has written."""
    found = manifest.get("made")
    own = signature(manifest["target"], manifest["file"], manifest["files"])
    return isinstance(found, str) and hmac.compare_digest(found.encode(), own.encode())


def signed_config(text: str) -> str:
    """The text of a config.yaml with a keyed hash of it as its last line, a comment."""
    return text + (MARK + _config_hash(text.encode())).decode() + "\n"


def is_signed_config(data: bytes) -> bool:
    """Whether the bytes of a config.yaml are as this user's own command wrote them."""
    text, mark, found = data.rpartition(MARK)
    return bool(mark) and hmac.compare_digest(found, _config_hash(text) + b"\n")


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
                os.link(temporary, path)  # whole at once; the first of two stays
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
        found, key = path.stat(), path.read_bytes()
        private = not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077)
        if len(key) == LENGTH and private:
            return key
    except (OSError, RuntimeError):  # no home, or a disk that can't be written to
        pass
    return bytes.fromhex(os.environ.setdefault(FALLBACK, secrets.token_hex(LENGTH)))
