"""Write checkpoints atomically, optionally in a thread, with digests that reveal removed or replaced entries."""

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from torch import Tensor
from torch.utils._pytree import tree_map

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
    saved, entries = checkpoint[KEY], {str(name): part for name, part in checkpoint.items()}
    names = [name for name in parts or saved if name in saved] if isinstance(saved, dict) else [KEY]
    for name in names:
        if name == KEY or name not in entries or saved[name] != _digest(entries[name]):
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
        check_digests(checkpoint, path, key="ckpt_path")

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        self.write(lambda file: torch.save(add_digests(in_main_memory(checkpoint)), file), path)

    def write(self, save: Callable[[Any], object], path: _PATH) -> None:
        """Let `save` write a file, and rename it to `path` when it is complete."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = target.parent / os.readlink(target) if target.is_symlink() else None
        with uninterrupted(), whole(target, replace_folder=True) as temporary:
            try:
                with open(temporary, "wb") as file:
                    save(file)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None  # of a full disk
                raise
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


class AsyncCheckpointIO(AtomicCheckpointIO):
    """Save a checkpoint into memory, and write the bytes in a thread during training.

    The next save, a load and the end of the fit wait for a write and raise its error. (Lightning's plugin of that name
    queues any number of copies, leaves them on the GPU, and raises an old error at each save.)
    """

    def __init__(self, read_folder: Callable[[Path], dict[str, Any]] | None = None) -> None:
        super().__init__(read_folder)
        self._thread: ThreadPoolExecutor | None = None
        self._write: Future[None] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        self.drain()
        saved = io.BytesIO()
        torch.save(add_digests(in_main_memory(checkpoint)), saved)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._write = self._thread.submit(self.write, lambda file: file.write(saved.getbuffer()), path)

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


def in_main_memory(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with GPU tensors copied to main memory, once each, so that any machine can load them."""
    copies: dict[Any, Tensor] = {}

    def fetch(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device.type in ("cpu", "meta"):
            return leaf
        key = (leaf.device, leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride())
        if key not in copies:
            copies[key] = leaf.detach().cpu()
        return copies[key]

    copied = tree_map(fetch, tree)
    for key, part in tree.items():
        if hasattr(part, "_metadata"):  # a module's state_dict has the module's version there
            copied[key]._metadata = part._metadata
    return copied
