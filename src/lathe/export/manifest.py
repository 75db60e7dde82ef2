"""The manifest of an export: its input and output, and the hashes of its files."""

import json
import re
from pathlib import Path
from typing import Any

from lathe.errors import UserError, require
from lathe.files import sha256, write_atomically
from lathe.trust import signature

NAME = "manifest.json"
VERSION = 1
MAX_BYTES = 10_000_000  # of manifest.json
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # names of files in the same folder


def write(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Write manifest.json with the size and SHA-256 of the other files in `folder`; return its content."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != NAME)
    hashes = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files}
    made = signature(str(content.get("target")), str(content.get("file")), hashes)
    manifest = {"version": VERSION, **content, "files": hashes, "made": made}
    write_atomically(folder / NAME, json.dumps(manifest, indent=2, allow_nan=False) + "\n")
    return manifest


def read(folder: str | Path, key: str = "target") -> dict[str, Any]:
    """Return the manifest of an export after verifying its files.

    `key` is the configuration key that led to the folder, for messages.

    Raises:
        UserError: the folder has no export, or a file is missing or was changed.
    """
    folder = Path(folder)
    path = folder / NAME
    require(path.is_file(), f"{key}={folder.name}: {folder} holds no export with a manifest: run scripts/export.py.")
    again = "export the run again with scripts/export.py"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError("too large")
        manifest = json.loads(path.read_text())
        version = manifest["version"]
        files = _files(manifest) if version == VERSION else {}
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise UserError(f"{path} can't be read as the manifest of an export: {again}.") from error
    require(version == VERSION, f"{path} is of version {version}, this Lathe reads {VERSION}: {again}.")
    own = manifest["file"] in files and all(PLAIN.fullmatch(name) for name in files)
    require(own, f"{path} names files that an export of target={manifest['target']} does not have: {again}.")
    for name, (size, digest) in files.items():
        found = folder / name
        require(found.is_file(), f"{found} is missing: {again}.")
        same = found.stat().st_size == size and sha256(found) == digest
        message = f"{found} is not the file that was exported, its SHA-256 differs from the manifest's: {again}."
        require(same, message)
    return dict(manifest)


def _files(manifest: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of each file; check the other entries that readers need.

    Raises:
        KeyError, TypeError, ValueError: an entry is missing or has another type.
    """
    preprocess, core = manifest["preprocess"], "inputs" in manifest
    given = manifest["inputs"] if core else [manifest["input"]]
    output = manifest["outputs"] if core else [manifest["output"]]
    texts = [manifest["target"], manifest["file"], *(each["dtype"] for each in given)]
    texts += [each["name"] for each in (*given, *output)] if core else []
    lists = [each["shape"] for each in (*given, *output)]
    if preprocess is not None:
        lists += [preprocess["mean"], preprocess["std"], preprocess["size"]]
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(found, list) for found in lists):
        raise TypeError("not of these types")
    return {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
