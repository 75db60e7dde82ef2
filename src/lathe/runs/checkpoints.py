"""Reads checkpoint files without running code, loads their weights into nets, and detects exports of older ones."""

import hashlib
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lathe.callbacks.checkpoint_io import check_digests
from lathe.compression.structure import apply_structure
from lathe.errors import UserError, require
from lathe.files import sha256
from lathe.runs.rundir import RunDir
from lathe.tasks.core import core_of


def read_checkpoint(path: Path, key: str = "checkpoint") -> dict[str, Any]:
    """Read a checkpoint that Lathe or Lightning wrote, which the configuration names as `key`.

    The tensors of a file stay on disk until they are used. A sharded folder is put together in memory.
    """
    if (path / "meta.pt").is_file():
        from lathe.strategies import sharded_files  # takes a second to import, and most checkpoints are files

        state = sharded_files.load(path, key=key)
    else:
        require(path.is_file(), f"{key}={path}: there is no such file; name a run, such as {key}=logs/latest.")
        state = read_plain(path, key)
    check_digests(state, path, key, parts=("structure",))
    problem = None
    if not isinstance(state, dict) or not isinstance(state.get("state_dict"), dict) or "global_step" not in state:
        problem = "it has no `state_dict` and `global_step`"
    else:
        for name, value in state["state_dict"].items():
            if not isinstance(name, str) or not plain_tensor(value):
                problem = f"its weight {name!a} is not a plain tensor"
        kinds = {"global_step": int, "epoch": int, "structure": dict, "callbacks": dict, "loops": dict}
        for name, kind in kinds.items():
            if name in state and not isinstance(state[name], kind):
                problem = f"its `{name}` is of type {type(state[name]).__name__}"
    require(problem is None, f"{key}={path} is not a checkpoint of a run: {problem}.")
    return dict(state)


def read_plain(path: Path, key: str) -> Any:
    """Read a file that torch has saved, if it holds plain data only."""
    with open(path, "rb"):  # raises PermissionError, where torch would call it an invalid file
        pass
    # torch doesn't compare the records with their checksums: a damaged block would become weights
    damaged = None
    try:
        with zipfile.ZipFile(path) as file:
            if all(record.compress_type == zipfile.ZIP_STORED for record in file.infolist()):  # as torch writes them
                damaged = file.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError):
        pass  # torn, or in the format of torch before 1.6: torch reports it
    message = f"{key}={path} is damaged: its record {damaged!a} has another checksum. Use another checkpoint."
    require(damaged is None, message)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        message = f"{key}={path} is not a checkpoint of plain tensors, so it is not opened: loading it could run code."
        raise UserError(message) from error
    except Exception as error:  # a torn or hostile file can fail in nearly any way
        message = f"{key}={path} can't be read as a checkpoint: it is cut off or of another kind; take another."
        raise UserError(message) from error


def plain_tensor(value: Any) -> bool:
    """Return whether `value` is a dense tensor with storage, and not a subclass or a quantized or meta tensor."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout == torch.strided
        and not value.is_meta
        and not value.is_quantized
    )


def restore(net: nn.Module, state: dict[str, Any], key: str, finite: bool = True) -> None:
    """Give a net that was built from its configuration the structure and the weights of a checkpoint."""
    apply_structure(core_of(net), state.get("structure", {}))
    if isinstance(net, LightningModule):  # a user's hook may build modules that the file has weights for
        net.on_load_checkpoint(state)
    load_weights(net, state["state_dict"], key)
    if finite:
        # the range of a fresh observer is infinite, so buffers are checked for NaN only
        bad = [name for name, value in net.named_parameters() if not bool(value.isfinite().all())]
        bad += [name for name, value in net.named_buffers() if bool(value.isnan().any())]
        first = bad[0] if bad else ""
        require(not bad, f"{key} holds weights that are not finite, {first} first: take another checkpoint.")


def load_weights(net: nn.Module, weights: dict[str, Tensor], key: str) -> None:
    """Load `weights`; every shape must fit, and every name but with a LightningModule's `strict_loading = False`."""
    own, strict = net.state_dict(), not isinstance(net, LightningModule) or net.strict_loading
    problems = [
        f"{name} is {list(weights[name].shape)} there and {list(own[name].shape)} here"
        for name in own
        if name in weights and own[name].shape != weights[name].shape
    ]
    if strict:
        problems += [f"it has no {name}" for name in own if name not in weights]
        problems += [f"it also has {name}" for name in sorted(weights.keys() - own.keys())]
    if problems:
        raise UserError(f"{key} does not fit this net: {problems[0]}; choose the model that it was trained with.")
    net.load_state_dict(weights, strict=strict)


# Exports of earlier weights: a run that is resumed keeps its exports.

KEY = "checkpoint_sha256"  # in a manifest


def checkpoint_hash(path: Path) -> str:
    """Return the SHA-256 of a checkpoint file, or of the hashes of the files in a sharded one."""
    if not path.is_dir():
        return sha256(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return hashlib.sha256("".join(f"{file.relative_to(path)} {sha256(file)}\n" for file in files).encode()).hexdigest()


def is_outdated(run: RunDir, manifest: Mapping[str, Any]) -> bool:
    """Return whether the run's checkpoint has changed since it was exported; False if either is missing."""
    name, exported = manifest["checkpoint"], manifest.get(KEY)
    if exported is None or name not in ("best", "last"):
        return False
    path = run.path / "checkpoints" / f"{name}.ckpt"
    return path.exists() and checkpoint_hash(path) != exported


def check_current(run: RunDir, target: str, manifest: Mapping[str, Any]) -> None:
    """Raise UserError for an outdated export."""
    name = manifest["checkpoint"]
    checkpoint = "" if name == "best" else f" checkpoint={name}"
    require(
        not is_outdated(run, manifest),
        f"target={target}: exports/{target} is of an earlier {name}.ckpt: export the run again with python "
        f"scripts/export.py run={run.path} target={target}{checkpoint}, or take target=module, the run's own net.",
    )
