"""Write checkpoints atomically, optionally in a thread, with digests that reveal removed or replaced entries."""

import copy
import hashlib
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from torch import Tensor

from lathe.errors import UserError
from lathe.files import uninterrupted, whole

KEY = "outline"


def add_digests(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint with a digest of each entry's names, types and shapes; values may be edited."""
    parts = {name: part for name, part in checkpoint.items() if name != KEY}
    return {**parts, KEY: {str(name): _digest(part) for name, part in parts.items()}}


def check_digests(
    checkpoint: Any, path: str | os.PathLike[str], key: str = "checkpoint", parts: tuple[str, ...] = ()
) -> None:
    """Raise UserError if a checkpoint differs from its digests, if it has any: Lightning's have none.

    `key` is the configuration's name of the file `path`; `parts` are the entries to compare, all by default.
    """
    if not isinstance(checkpoint, dict) or KEY not in checkpoint:
        return
    saved, found = checkpoint[KEY], {str(name): part for name, part in checkpoint.items()}
    names = [name for name in parts or saved if name in saved] if isinstance(saved, dict) else [KEY]
    for name in names:
        if name == KEY or name not in found or saved[name] != _digest(found[name]):
            raise UserError(
                f"{key}={path} is not as it was written: something in `{name}` is not there, or is of another type or "
                "shape. Use another checkpoint, or start a new run from its weights with ckpt_path."
            )


def _digest(part: Any) -> str:
    lines: list[str] = []
    _describe(part, "", lines)
    return hashlib.sha256("\n".join(sorted(lines)).encode(errors="backslashreplace")).hexdigest()[:16]


def _describe(tree: Any, path: str, lines: list[str]) -> None:
    """Append a line for each node of `tree`, which is at `path`."""
    if isinstance(tree, Tensor):
        lines.append(f"{path} {tree.dtype} {list(tree.shape)}")
    elif isinstance(tree, (dict, Mapping)):
        lines.append(f"{path} dict")
        for name, value in tree.items():
            _describe(value, f"{path}.{name!a}", lines)
    else:
        lines.append(f"{path} {type(tree).__name__}")
        for name, value in enumerate(tree) if isinstance(tree, (list, tuple)) else ():
            _describe(value, f"{path}.{name!a}", lines)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint to a temporary file and rename it, so that a file is always complete.

    `read_folder` reads a sharded strategy's checkpoint folder. A file that replaces one removes it.
    """

    def __init__(self, read_folder: Callable[[Path], dict[str, Any]] | None = None) -> None:
        self.read_folder = read_folder

    def load_checkpoint(self, path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self.read_folder is not None and Path(path).is_dir():
            return self.read_folder(Path(path))
        checkpoint: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        self.check(checkpoint, path)
        return checkpoint

    @staticmethod
    def check(checkpoint: Any, path: _PATH) -> None:
        """Raise UserError if an entry is missing, or differs from what was written."""
        check_digests(checkpoint, path)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = target.parent / os.readlink(target) if target.is_symlink() else None
        with uninterrupted(), whole(target, replace_folder=True) as temporary:
            try:
                with open(temporary, "wb") as file:
                    torch.save(in_main_memory(add_digests(checkpoint)), file)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None  # of a full disk
                raise
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


class AsyncCheckpointIO(AtomicCheckpointIO):
    """Copy a checkpoint into memory and write the copy in a thread during training.

    The next save, a load and the end of the fit wait for a write and raise its error. (Lightning's plugin of that name
    queues any number of copies, leaves them on the GPU, and raises an old error at each save.)
    """

    def __init__(self, read_folder: Callable[[Path], dict[str, Any]] | None = None) -> None:
        super().__init__(read_folder)
        self._thread: ThreadPoolExecutor | None = None
        self._write: Future[None] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        self.drain()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._write = self._thread.submit(super().save_checkpoint, snapshot(checkpoint), path)

    def load_checkpoint(self, path: _PATH, *args: Any, **kwargs: Any) -> Any:
        self.drain()
        return super().load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: _PATH) -> None:
        self.drain()
        super().remove_checkpoint(path)

    def drain(self) -> None:
        """Wait for the current write and raise its error, once."""
        write, self._write = self._write, None
        if write is not None:
            write.result()

    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None


def in_main_memory(tree: Any) -> Any:
    """Return nested containers with GPU tensors copied to main memory, so that any machine can load them."""
    storages: dict[Any, Any] = {}

    def fetch(leaf: Any) -> Any:
        on_device = isinstance(leaf, Tensor) and leaf.device.type not in ("cpu", "meta")
        return _copied(leaf.detach(), storages) if on_device else leaf

    return _mapped(tree, fetch)


def snapshot(tree: Any) -> Any:
    """Return a copy of nested containers with tensors in main memory; shared storage stays shared."""
    storages: dict[Any, Any] = {}
    return _mapped(
        tree, lambda leaf: _copied(leaf.detach(), storages) if isinstance(leaf, Tensor) else copy.deepcopy(leaf)
    )


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested containers with `change` applied to their leaves."""
    if type(tree) in (dict, OrderedDict):
        found = type(tree)((key, _mapped(value, change)) for key, value in tree.items())
        if type(tree) is OrderedDict:  # a module's state_dict has the module's version as an attribute
            vars(found).update(vars(tree))
        return found
    if type(tree) in (list, tuple):
        return type(tree)(_mapped(value, change) for value in tree)
    return change(tree)


def _copied(tensor: Tensor, storages: dict[Any, Any]) -> Tensor:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return tensor.to("cpu", copy=True)
    source = tensor.untyped_storage()
    if not source.nbytes():
        return tensor.to("cpu", copy=True)
    place = (source.device, source.data_ptr())
    if place not in storages:
        storages[place] = source.clone() if source.device.type == "cpu" else source.cpu()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(storages[place], tensor.storage_offset(), tensor.size(), tensor.stride())
