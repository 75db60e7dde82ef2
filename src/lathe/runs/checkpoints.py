"""Reading checkpoint files without running code, and putting their weights into plain nets."""

import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lathe.callbacks.outline import check_outline
from lathe.compression.structure import apply_structure
from lathe.errors import UserError, require


def read_checkpoint(path: Path, key: str = "checkpoint") -> dict[str, Any]:
    """The contents of a checkpoint that Lathe or Lightning wrote. A file is read through once, for its checksums, and
    its tensors stay on disk until they are used; a folder that a sharded strategy wrote is put together in memory.

    `key` is the configuration key that named the file.

    Raises:
        UserError: no such file, or it is truncated, damaged, foreign, or holds more than plain data.
    """
    if (path / "meta.pt").is_file():
        from lathe.strategies import sharded_files  # here: most checkpoints are files, and its imports take a second

        return _checked(sharded_files.read(path, key), path, key)
    if not path.is_file():
        if path.exists() and not path.is_dir():
            raise UserError(f"{key}={path} is a device, a pipe or a socket, and no file: take another.")
        named = f": name its run, such as {key}=logs/latest" if str(path) in ("best", "last") else ""
        raise UserError(
            f"{key}={path}: there is no such file; a run's checkpoints are best.ckpt and last.ckpt in its "
            f"checkpoints folder{named}."
        )
    return _checked(read_plain(path, key), path, key)


def read_plain(path: Path, key: str) -> Any:
    """What torch has saved in a file, if it is plain data.

    Raises:
        UserError: it is truncated, foreign, or holds more than plain data.
    """
    with open(path, "rb"):  # of a file that may not be read torch says that it is none
        pass
    _check_sums(path, key)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{key}={path} is not a checkpoint of plain tensors, so it is not opened: loading it could run code."
        ) from error
    except Exception as error:  # a torn or hostile file can fail in nearly any way
        raise UserError(
            f"{key}={path} can't be read as a checkpoint: it is cut off or of another kind; take another."
        ) from error


def _check_sums(path: Path, key: str) -> None:
    """Holds what a file's records are by now against the sums that were written with them, which torch doesn't do: a
    damaged block of a disk would be weights.
    """
    damaged = None
    try:
        with zipfile.ZipFile(path) as file:
            if all(record.compress_type == zipfile.ZIP_STORED for record in file.infolist()):  # as torch writes them
                damaged = file.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError):
        return  # torn, or in the format of torch before 1.6: torch says what it is
    require(
        damaged is None,
        f"{key}={path} is damaged: its record {damaged!a} is not what was written (its checksum differs); take another "
        "checkpoint, or a copy of this one.",
    )


def _checked(state: Any, path: Path, key: str) -> dict[str, Any]:
    check_outline(state, path, key, parts=("structure",))
    if not isinstance(state, dict) or not isinstance(state.get("state_dict"), dict) or "global_step" not in state:
        raise UserError(f"{key}={path} is not a checkpoint of a run: it has no `state_dict` and `global_step`.")
    odd = next(
        (name for name, value in state["state_dict"].items() if not isinstance(name, str) or not plain_tensor(value)),
        None,
    )
    if odd is not None:
        raise UserError(f"{key}={path} is not a checkpoint of a run: its weight {odd!a} is no plain tensor.")
    for name, kind in (("global_step", int), ("epoch", int), ("structure", dict), ("callbacks", dict), ("loops", dict)):
        if name in state and not isinstance(state[name], kind):
            raise UserError(
                f"{key}={path} is not a checkpoint of a run: its `{name}` is of type {type(state[name]).__name__}."
            )
    return state


def plain_tensor(value: Any) -> bool:
    """Whether `value` is a tensor with numbers of its own in memory or on disk: none without storage, sparse or of
    another class.
    """
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout == torch.strided
        and not value.is_meta
        and not value.is_quantized
    )


def restore(net: nn.Module, state: dict[str, Any], key: str, finite: bool = True) -> None:
    """Makes a net as its configuration builds it what `state`, a checkpoint's contents, says: its structure, then its
    weights. With `finite`, weights that are no numbers are refused: whatever is computed with them means nothing.

    Raises:
        UserError: they don't fit or are not finite; the sentence names the first.
    """
    apply_structure(net, state.get("structure", {}))
    if isinstance(net, LightningModule):  # a user's own, whose hook may make what the file has weights for
        net.on_load_checkpoint(state)
    load_weights(net, state["state_dict"], key)
    if finite:
        # an observer's range begins at infinity, so buffers are held against NaN alone
        bad = [name for name, value in net.named_parameters() if not bool(value.isfinite().all())]
        bad += [name for name, value in net.named_buffers() if bool(value.isnan().any())]
        if bad:
            raise UserError(
                f"{key} holds weights that are not finite, {bad[0]} first: take another checkpoint, or train anew with "
                "callbacks.nan_guard on."
            )


def load_weights(net: nn.Module, weights: dict[str, Tensor], key: str) -> None:
    """Puts `weights` into `net`; every name and shape has to fit.

    Raises:
        UserError: they don't; the sentence names the first that differs.
    """
    own = net.state_dict()
    for name in own:
        if name not in weights:
            raise UserError(
                f"{key} does not fit this net: it has no {name}; choose the model and sizes that it was trained with."
            )
        if own[name].shape != weights[name].shape:
            raise UserError(
                f"{key} does not fit this net: {name} is {list(weights[name].shape)} there and {list(own[name].shape)} "
                "here; choose the model and sizes that it was trained with."
            )
    extra = sorted(weights.keys() - own.keys())
    if extra:
        raise UserError(
            f"{key} does not fit this net: it also has {extra[0]}; choose the model and sizes that it was trained with."
        )
    net.load_state_dict(weights)
