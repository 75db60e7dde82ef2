"""Sharded checkpoints: a folder of torch.distributed.checkpoint's files, replaced atomically.

`last.ckpt` is a relative link to the folder `.last.ckpt.<n>` next to it. A new checkpoint is written into a new folder,
then the link is replaced and the old folder removed. At any interruption, the link leads to a complete checkpoint.

In the folder, `meta.pt` holds the checkpoint with None for each sharded tensor, and where each of these is in torch's
files, as plain data. torch's own table of contents is a pickle, which could run code: it is not read.
"""

import os
import pickle
import secrets
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import MappingKey, tree_map_with_path

from lathe.errors import UserError
from lathe.files import uninterrupted, whole
from lathe.strategies.dtensors import parameters_by_id

META = "meta.pt"


def is_sharded(path: Path) -> bool:
    """Return whether `path` is a folder that `save` has written."""
    return path.is_dir() and (path / META).is_file()


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Write `checkpoint`, with its sharded tensors, as `path`. Collective: every rank passes the same tree."""
    shards: dict[str, Tensor] = {}
    keys: dict[str, list[Any]] = {}

    def put_aside(place: Any, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        way = [key.key if isinstance(key, MappingKey) else key.idx for key in place]
        name = "/".join(map(str, way))
        shards[name], keys[name] = leaf.detach(), way
        return None

    rest = tree_map_with_path(put_aside, checkpoint)
    several = torch.distributed.get_world_size() > 1
    writes = torch.distributed.get_rank() == 0
    version = [f".{path.name}.{secrets.token_hex(4)}"]
    if several:
        torch.distributed.broadcast_object_list(version)
    folder = path.with_name(version[0])
    if writes:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path)
    metadata = dcp.save(dict(shards), storage_writer=FileSystemWriter(str(folder)))  # once every rank has written
    if writes:
        table = {name: {"keys": way, **_plain_record(metadata, name)} for name, way in keys.items()}
        with uninterrupted(), whole(folder / META) as temporary, open(temporary, "wb") as file:
            torch.save({"checkpoint": rest, "shards": table}, file)
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
    return _load(path, key, lambda keys: None)


def load_shards(
    path: Path,
    module_state: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer],
    prefix: str,
    key: str = "checkpoint",
) -> dict[str, Any]:
    """Read a checkpoint, with tensors sharded as in this process: each rank reads only its shards.

    `module_state` has the checkpoint's names after `prefix`. Without optimizers, their states are omitted.
    """
    parameters = [parameters_by_id(optimizer) for optimizer in optimizers]

    def counterpart(keys: list[Any]) -> Tensor | None:
        of_optimizer = keys[0] == "optimizer_states" and parameters
        return parameters[keys[1]].get(keys[3]) if of_optimizer else module_state.get(f"{prefix}{keys[-1]}")

    return _load(path, key, counterpart, leave_out=() if optimizers else ("optimizer_states",))


def _load(path: Path, key: str, counterpart: Any, leave_out: Sequence[str] = ()) -> dict[str, Any]:
    """Read the folder; each tensor is sharded as its counterpart, if that is sharded and of the same shape."""
    try:
        meta = torch.load(path / META, map_location="cpu", weights_only=True)
        checkpoint: dict[str, Any] = meta["checkpoint"]
        table = {name: record for name, record in meta["shards"].items() if record["keys"][0] not in leave_out}
        tensors: dict[str, Tensor] = {}
        for name, record in table.items():
            like, size = counterpart(record["keys"]), torch.Size(record["size"])
            if isinstance(like, DTensor) and like.shape == size:
                tensors[name] = torch.empty_like(like.detach(), dtype=record["dtype"])
            else:
                tensors[name] = torch.empty(size, dtype=record["dtype"])
        metadata = _metadata(table)
        if tensors:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # expected with no_dist
                dcp.load(dict(tensors), storage_reader=_Reader(path, metadata), no_dist=True)
        for name, tensor in tensors.items():
            *way, last = table[name]["keys"]
            place: Any = checkpoint
            for step in way:
                place = place[step]
            place[last] = tensor
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{key}={path} is not a checkpoint of plain tensors, so it is not opened: loading it could run code."
        ) from error
    except (Exception, dcp.CheckpointException) as error:  # a torn or hostile file can fail in nearly any way
        raise UserError(
            f"{key}={path} can't be read as a sharded checkpoint: it is cut off or of another kind; take another."
        ) from error
    return checkpoint


def _plain_record(metadata: Metadata, name: str) -> dict[str, Any]:
    """Return torch's record of a tensor as plain data; a chunk is its offsets and sizes, and its place in a file."""
    record: Any = metadata.state_dict_metadata[name]
    chunks = []
    for index, chunk in enumerate(record.chunks):
        info = metadata.storage_data[MetadataIndex(name, chunk.offsets, index)]
        chunks.append([list(chunk.offsets), list(chunk.sizes), info.relative_path, info.offset, info.length])
    return {"size": list(record.size), "dtype": record.properties.dtype, "chunks": chunks}


def _metadata(table: Mapping[str, Any]) -> Metadata:
    """Return torch's records of plain ones."""
    records: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name, record in table.items():
        chunks = []
        for index, (offsets, sizes, file, start, length) in enumerate(record["chunks"]):
            if Path(file).name != file:
                raise pickle.UnpicklingError(f"{file} is not in the folder")
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            storage[MetadataIndex(name, offsets, index)] = _StorageInfo(file, start, length)
        properties = TensorProperties(record["dtype"])
        records[name] = TensorStorageMetadata(properties, torch.Size(record["size"]), chunks)
    return Metadata(records, storage_data=storage)


class _Reader(FileSystemReader):
    """torch's reader with a table of contents that has already been read."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(str(path))
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata
