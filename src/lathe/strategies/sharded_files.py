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

    def put_aside(path_keys: Any, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        way = [key.key if isinstance(key, MappingKey) else key.idx for key in path_keys]
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
        table = {}  # torch's records as plain data; a chunk is its offsets and sizes, and its place in a file
        for name, way in keys.items():
            record: Any = metadata.state_dict_metadata[name]
            infos = [
                metadata.storage_data[MetadataIndex(name, chunk.offsets, index)]
                for index, chunk in enumerate(record.chunks)
            ]
            chunks = [
                [list(chunk.offsets), list(chunk.sizes), info.relative_path, info.offset, info.length]
                for chunk, info in zip(record.chunks, infos, strict=True)
            ]
            facts = {"keys": way, "size": list(record.size), "dtype": record.properties.dtype}
            table[name] = {**facts, "chunks": chunks}
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


def load(
    path: Path,
    module_state: Mapping[str, Tensor] | None = None,
    optimizers: Sequence[Optimizer] | None = None,
    key: str = "checkpoint",
    prefix: str = "net.",
) -> dict[str, Any]:
    """Return the checkpoint in the folder `path`, with full tensors; needs no process group.

    With `module_state`, of the checkpoint's names after `prefix`, and `optimizers`, tensors are sharded as there, and
    each rank reads only its shards. An empty list of optimizers omits their states.

    Raises:
        UserError: the folder is incomplete, of another kind, or holds more than plain data.
    """
    try:
        return _load(path, module_state or {}, optimizers, prefix)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{key}={path} is not a checkpoint of plain tensors, so it is not opened: loading it could run code."
        ) from error
    except (Exception, dcp.CheckpointException) as error:  # a torn or hostile file can fail in nearly any way
        raise UserError(
            f"{key}={path} can't be read as a sharded checkpoint: it is cut off or of another kind; take another."
        ) from error


def _load(
    path: Path, module_state: Mapping[str, Tensor], optimizers: Sequence[Optimizer] | None, prefix: str
) -> dict[str, Any]:
    meta = torch.load(path / META, map_location="cpu", weights_only=True)
    checkpoint, shards = meta["checkpoint"], meta["shards"]
    if optimizers is not None and not optimizers:
        shards = {name: record for name, record in shards.items() if record["keys"][0] != "optimizer_states"}
    parameters = [parameters_by_id(optimizer) for optimizer in optimizers or ()]
    tensors: dict[str, Tensor] = {}
    for name, record in shards.items():
        keys, size, dtype = record["keys"], torch.Size(record["size"]), record["dtype"]
        like = module_state.get(f"{prefix}{keys[-1]}")
        if keys[0] == "optimizer_states" and parameters:
            like = parameters[keys[1]].get(keys[3])
        if isinstance(like, DTensor) and like.shape == size:
            tensors[name] = torch.empty_like(like.detach(), dtype=dtype)
        else:
            tensors[name] = torch.empty(size, dtype=dtype)
    if tensors:
        reader = _Reader(path, _metadata(shards))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # expected with no_dist
            dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
    for name, tensor in tensors.items():
        *parents, last = shards[name]["keys"]
        node: Any = checkpoint
        for parent in parents:
            node = node[parent]
        node[last] = tensor
    return dict(checkpoint)


def _metadata(shards: Mapping[str, Any]) -> Metadata:
    """Return torch's table of contents for the table in `meta.pt`, whose files must be in the folder."""
    records: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name, record in shards.items():
        chunks = []
        for index, (offsets, sizes, file, start, length) in enumerate(record["chunks"]):
            if Path(file).name != file:
                raise pickle.UnpicklingError(f"{file} is not in the folder")
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            storage[MetadataIndex(name, offsets, index)] = _StorageInfo(file, start, length)
        records[name] = TensorStorageMetadata(TensorProperties(record["dtype"]), torch.Size(record["size"]), chunks)
    return Metadata(records, storage_data=storage)


class _Reader(FileSystemReader):
    """torch's reader with a table of contents that has already been read."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(str(path))
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata
