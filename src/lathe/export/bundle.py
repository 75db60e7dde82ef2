"""The folder of an export: its files, the manifest with their hashes, and the opened file as a function of arrays."""

import errno
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe import export, files, trust
from lathe.errors import UserError, require
from lathe.export import Array
from lathe.export.inputs import as_list
from lathe.export.torch_runner import prepared
from lathe.trust import made_here, signature

MANIFEST = "manifest.json"
VERSION = 1
MAX_BYTES = 10_000_000  # of manifest.json
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # names of files in the same folder
SPARE = 2**20  # bytes: with less free space the disk counts as full, whatever the error
AGAIN = "export the run again with scripts/export.py"


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """Write a file atomically, with an error of the disk as UserError."""
    path = files.followed(Path(path))
    require(path.parent.exists(), f"{path} can't be written, its folder does not exist: make it first.")
    with _disk_errors(path), files.whole(path) as temporary:
        temporary.touch()
        yield temporary


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = files.disk_reason(error)
        if reason is None:
            raise
        raise UserError(f"{error.filename or path} can't be written, {reason}.") from error


def readable(path: str | Path) -> Path:
    """Return the path; raise UserError if it is not a file."""
    require(Path(path).is_file(), f"path={path}: there is no such file; export the run first.")
    return Path(path)


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` at the end, or is removed after an error or a signal.

    Raises UserError if the disk is full or not writable, or `path` is not an export.
    """
    foreign = path.is_file() or (path.is_dir() and any(path.iterdir()) and not (path / MANIFEST).is_file())
    require(not foreign, f"{path} is there, and no export that Lathe has written: move it elsewhere.")
    first = not path.parent.exists()
    try:
        with _disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.whole(path, replace_folder=True) as temporary:
                temporary.mkdir()
                yield temporary
    except Exception as error:
        # exporters raise other errors if the disk is full
        if not isinstance(error, UserError | OSError) and shutil.disk_usage(path.parent).free < SPARE:
            reason = files.disk_reason(OSError(errno.ENOSPC, ""))
            raise UserError(f"{path} can't be written, {reason}.") from error
        raise
    finally:
        if first:
            with suppress(OSError):  # it holds another export
                path.parent.rmdir()


def write_manifest(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Write manifest.json with the size and SHA-256 of the other files in `folder`; return its content."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    hashes = {path.name: {"bytes": path.stat().st_size, "sha256": files.sha256(path)} for path in paths}
    mark = signature(str(content.get("target")), str(content.get("file")), hashes)
    manifest = {"version": VERSION, **content, "files": hashes, "made": mark}
    files.write_atomically(folder / MANIFEST, json.dumps(manifest, indent=2, allow_nan=False) + "\n")
    return manifest


def read_manifest(folder: str | Path, key: str = "target") -> dict[str, Any]:
    """Return the manifest of an export after verifying its files; messages name the configuration key `key`.

    Raises:
        UserError: the folder has no export, or a file is missing or was changed.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    require(path.is_file(), f"{key}={folder.name}: {folder} holds no export with a manifest: run scripts/export.py.")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError("too large")
        manifest = dict(json.loads(path.read_text()))
        version = manifest["version"]
        hashes = _checked_hashes(manifest) if version == VERSION else {}
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise UserError(f"{path} can't be read as the manifest of an export: {AGAIN}.") from error
    require(version == VERSION, f"{path} is of version {version}, this Lathe reads {VERSION}: {AGAIN}.")
    own = manifest["file"] in hashes and all(PLAIN.fullmatch(name) for name in hashes)
    require(own, f"{path} names files that an export of target={manifest['target']} does not have: {AGAIN}.")
    for name, (size, digest) in hashes.items():
        file = folder / name
        require(file.is_file(), f"{file} is missing: {AGAIN}.")
        same = file.stat().st_size == size and files.sha256(file) == digest
        message = f"{file} is not the file that was exported, its SHA-256 differs from the manifest's: {AGAIN}."
        require(same, message)
    return manifest


def _checked_hashes(manifest: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of each file; raise KeyError, TypeError or ValueError for wrong entries."""
    preprocess, core = manifest["preprocess"], "inputs" in manifest
    inputs = manifest["inputs"] if core else [manifest["input"]]
    outputs = manifest["outputs"] if core else [manifest["output"]]
    texts = [manifest["target"], manifest["file"], *(each["dtype"] for each in inputs)]
    texts += [each["name"] for each in (*inputs, *outputs)] if core else []
    lists = [each["shape"] for each in (*inputs, *outputs)]
    if preprocess is not None:
        lists += [preprocess["mean"], preprocess["std"], preprocess["size"]]
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(shape, list) for shape in lists):
        raise TypeError("not of these types")
    return {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}


@dataclass(frozen=True)
class Bundle:
    """`run` maps inputs as in `manifest["input"]`, `[batch, ...]`, to logits `[batch, ..., classes]`.

    For the core of a LightningModule it takes an array for each of `manifest["inputs"]`, and returns one for each of
    `manifest["outputs"]`: one array, or several in a list.
    """

    folder: Path
    manifest: dict[str, Any]
    run: Callable[..., Any]

    def __call__(self, *arrays: Array, **named: Array) -> Any:
        """Return logits of uint8 pixels `[batch, channels, height, width]` or token ids `[batch, time]`.

        For a core, the arrays are its inputs in their order, or by name, and the outputs come in a dict by name.
        """
        if "inputs" not in self.manifest:
            return self.run(prepared(self.manifest, *arrays))
        inputs = [*arrays, *(named[entry["name"]] for entry in self.manifest["inputs"][len(arrays) :])]
        outputs = (entry["name"] for entry in self.manifest["outputs"])
        return dict(zip(outputs, as_list(self.run(*inputs)), strict=True))


def open_bundle(
    folder: str | Path, threads: int | None = None, key: str = "target", device: str | None = None
) -> Bundle:
    """Open the export in `folder`, with `threads` and `device` as its target's `load` takes them.

    Raises:
        UserError: the folder has no export, the export was changed, its target can't be used here or on `device`, it
            has only weights, or it is an untrusted program from another machine.
    """
    folder = Path(folder)
    manifest = read_manifest(folder, key)
    name = str(manifest["target"])
    target = export.get(name)
    require(target.computes, f"{key}={name} holds weights alone, which compute nothing: choose another target.")
    check_origin(folder, manifest)
    fits = device is None or (target.has_gpu and "inputs" not in manifest)
    require(
        fits, f"{key}={name} runs on CPUs alone, not on {device}: leave trainer.accelerator=cpu, or export to onnx."
    )
    try:
        run = target.load(folder / manifest["file"], threads, device)
    except ImportError as error:
        raise UserError(target.available() or f"{key}={name} can't be opened: {error}.") from error
    return Bundle(folder, manifest, run)


def check_origin(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise UserError for an untrusted program from another machine."""
    if export.get(manifest["target"]).is_program and not made_here(manifest):
        trust.allow_program(str(manifest["target"]), folder)
