"""Sharded checkpoints: a folder of torch.distributed.checkpoint's files, replaced atomically.

`last.ckpt` is a relative link to the folder `.last.ckpt.<n>` next to it. A new checkpoint is written into a new folder,
then the link is replaced and the old folder removed. At any interruption, the link leads to a complete checkpoint.

In the folder, `meta.pt` holds the checkpoint with None for each sharded tensor, and the path of keys to each of them.
torch's files hold the shards. Reading runs no code from the files.
"""

import os
import pickle  # used through a class that resolves only the names of torch's own records
import secrets
import shutil
import warnings
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lathe.errors import UserError
from lathe.files import uninterrupted, whole
from lathe.strategies.full_state import map_spread, parameters_by_id

META = "meta.pt"
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))),
}


def is_sharded(path: Path) -> bool:
    """Return whether `path` is a folder that `save` has written."""
    return path.is_dir() and (path / META).is_file()


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Write `checkpoint`, with its sharded tensors, as `path`. Collective: every rank passes the same tree."""
    spread: dict[str, Tensor] = {}
    paths: dict[str, list[Any]] = {}

    def put_aside(leaf: DTensor, keys: tuple[Any, ...]) -> None:
        name = "/".join(map(str, keys))
        spread[name], paths[name] = leaf.detach(), list(keys)

    rest = map_spread(checkpoint, put_aside)
    several = torch.distributed.get_world_size() > 1
    writes = torch.distributed.get_rank() == 0
    version = [f".{path.name}.{secrets.token_hex(4)}"]
    if several:
        torch.distributed.broadcast_object_list(version)
    folder = path.with_name(version[0])
    if writes:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path)
    dcp.save(dict(spread), storage_writer=FileSystemWriter(str(folder)))  # returns once every rank has written
    if writes:
        with uninterrupted(), whole(folder / META) as temporary, open(temporary, "wb") as file:
            torch.save({"checkpoint": rest, "spread": paths}, file)
        with whole(path, replace_folder=True) as link:  # also if `path` is a folder, copied by following the link
            link.symlink_to(folder.name, target_is_directory=True)
        sweep(path)
    if several:
        torch.distributed.barrier()


def sweep(path: Path) -> None:
    """Remove the folders that earlier checkpoints `path` and killed writers have left."""
    current = path.parent / os.readlink(path) if path.is_symlink() else None
    for folder in path.parent.glob(f".{path.name}.*"):
        if folder.is_dir() and not folder.is_symlink() and folder != current:
            shutil.rmtree(folder, ignore_errors=True)


def read(path: Path, key: str = "checkpoint") -> dict[str, Any]:
    """Return the checkpoint in the folder `path`, with full tensors; needs no process group.

    Raises:
        UserError: the folder is incomplete, of another kind, or holds more than plain data.
    """
    meta, metadata = _open(path, key)
    tensors = {name: _empty(metadata, name) for name in meta["spread"]}
    _load(path, tensors, metadata, key)
    return _put_back(meta, tensors)


def load_spread(
    path: Path,
    module_state: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer],
    prefix: str,
    key: str = "checkpoint",
) -> dict[str, Any]:
    """Read a checkpoint, with tensors sharded as in this process: each rank reads only its shards.

    `module_state` has the checkpoint's names after `prefix`. Without optimizers, their states are omitted.
    """
    meta, metadata = _open(path, key)
    parameters = [parameters_by_id(optimizer) for optimizer in optimizers]
    tensors: dict[str, Tensor] = {}
    for name, keys in meta["spread"].items():
        counterpart = module_state.get(f"{prefix}{keys[-1]}")
        if keys[0] == "optimizer_states":
            if not optimizers:
                continue
            counterpart = parameters[keys[1]].get(keys[3])
        whole = _empty(metadata, name)
        if not isinstance(counterpart, DTensor) or counterpart.shape != whole.shape:
            tensors[name] = torch.empty_like(whole, device="cpu")
        else:
            tensors[name] = torch.empty_like(counterpart.detach(), dtype=whole.dtype)
    _load(path, tensors, metadata, key)
    return _put_back(meta, tensors)


def _put_back(meta: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    checkpoint: dict[str, Any] = meta["checkpoint"]
    for name, tensor in tensors.items():
        *way, last = meta["spread"][name]
        place: Any = checkpoint
        for step in way:
            place = place[step]
        place[last] = tensor
    return checkpoint


def _empty(metadata: Metadata, name: str) -> Tensor:
    record = metadata.state_dict_metadata[name]
    assert isinstance(record, TensorStorageMetadata)
    return torch.empty(record.size, dtype=record.properties.dtype, device="meta")


def _open(path: Path, key: str) -> tuple[dict[str, Any], Metadata]:
    try:
        meta = torch.load(path / META, map_location="cpu", weights_only=True)
        metadata = read_metadata(path)
        if set(meta["spread"]) - set(metadata.state_dict_metadata) or not isinstance(meta["checkpoint"], dict):
            raise KeyError("spread")
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{key}={path} is not a checkpoint of plain tensors, so it is not opened: loading it could run code."
        ) from error
    except Exception as error:  # a torn or hostile file can fail in nearly any way
        raise UserError(
            f"{key}={path} can't be read as a sharded checkpoint: it is cut off or of another kind; take another."
        ) from error
    return meta, metadata


def _text(*parts: str) -> str:
    return "/".join(map(str, parts))


def _member(kind: Any, name: str) -> Any:
    if not isinstance(kind, type) or not issubclass(kind, Enum) or name not in kind.__members__:
        raise pickle.UnpicklingError("it names builtins.getattr")
    return kind[name]


class _RecordUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # as Python 3.11.2 pickles the members of an enumeration
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return _text  # the path where the folder was written, which is unused
        if name not in _RECORDS.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def read_metadata(path: Path) -> Metadata:
    """Read the metadata of torch's files, which is a pickle, without running anything that it names.

    Raises:
        pickle.UnpicklingError: it holds more than torch's records, or points out of its folder.
    """
    with open(path / ".metadata", "rb") as file:
        try:
            metadata = _RecordUnpickler(file).load()
        except pickle.UnpicklingError:
            raise
        except Exception as error:  # a damaged pickle can fail in any way
            raise EOFError(str(error)) from error
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError("it is no table of contents")
    for info in (metadata.storage_data or {}).values():
        if not isinstance(info, _StorageInfo) or Path(info.relative_path).name != info.relative_path:
            raise pickle.UnpicklingError("it points out of its folder")
        if info.transform_descriptors:
            raise pickle.UnpicklingError("it asks for code of its own")
    if not all(isinstance(record, TensorStorageMetadata) for record in metadata.state_dict_metadata.values()):
        raise pickle.UnpicklingError("it holds more than tensors")
    return metadata


class _Reader(FileSystemReader):
    """torch's reader with metadata that has already been read."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(str(path))
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def _load(path: Path, tensors: dict[str, Tensor], metadata: Metadata, key: str) -> None:
    if not tensors:
        return
    for name, tensor in tensors.items():
        if tensor.is_meta:
            tensors[name] = torch.empty_like(tensor, device="cpu")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # expected with no_dist
            dcp.load(dict(tensors), storage_reader=_Reader(path, metadata), no_dist=True)
    except (
        RuntimeError,
        EOFError,
        ValueError,
        OSError,
        KeyError,
        pickle.UnpicklingError,
        dcp.CheckpointException,
    ) as error:
        raise UserError(
            f"{key}={path} can't be read as a sharded checkpoint: it is cut off or of another kind; take another."
        ) from error
