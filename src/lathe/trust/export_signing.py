"""Sign exports and run directories with a key of this user, so that locally made ones are trusted.

Some exports are programs, and a run's config.yaml may name any class: loading either can run code. Files that this user
has not signed are loaded only if they are trusted.
"""

import hashlib
import hmac
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

FALLBACK = "LATHE_EXPORT_KEY"  # for this process and its children, where the user's folder can't be written to
LENGTH = 32
MARK = b"# signature: "  # begins the last line of a config.yaml


def signature(target: str, file: str, hashes: Any) -> str:
    """Return the keyed hash of an export: its target, the name of its file, sizes and hashes of all its files."""
    return hmac.new(_key(), json.dumps([target, file, hashes], sort_keys=True).encode(), hashlib.sha256).hexdigest()


def made_here(manifest: dict[str, Any]) -> bool:
    """True if this user has written a manifest, whose hashes were compared with the files before."""
    found = manifest.get("made")
    own = signature(manifest["target"], manifest["file"], manifest["files"])
    return isinstance(found, str) and hmac.compare_digest(found.encode(), own.encode())


def signed_config(text: str) -> str:
    """Return the text of a config.yaml with its keyed hash as a comment in the last line."""
    return text + (MARK + _config_hash(text.encode())).decode() + "\n"


def is_signed_config(data: bytes) -> bool:
    """True if this user has signed the bytes of a config.yaml, and they were not changed since."""
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
                os.link(temporary, path)  # atomic; the first of two stays
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
        found, key = path.stat(), path.read_bytes()
        private = not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077)
        if len(key) == LENGTH and private:
            return key
    except (OSError, RuntimeError):  # no home folder, or a read-only disk
        pass
    return bytes.fromhex(os.environ.setdefault(FALLBACK, secrets.token_hex(LENGTH)))
