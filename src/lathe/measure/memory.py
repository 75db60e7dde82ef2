"""Bytes of a net, and memory of a training process, counted from existing tensors by storage, not by a formula.

A storage counts once, however many tensors view it. A DTensor counts with the shard of this process, DeepSpeed's
partitions where its optimizer keeps them.
"""

import gzip
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lathe.measure.shards import is_sharded, local, whole

_WALKED = ("torch.optim", "torch.amp", "deepspeed", "lathe.optim")  # modules whose objects may hold state


@dataclass(frozen=True)
class StateBytes:
    """Bytes of this process's share of the training state; `gradients` are those that exist when counted."""

    parameters: int
    gradients: int
    optimizer: int


def storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of this process's shards of `tensors`, each once, by a key of the storage."""
    parts: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        part = local(tensor)
        if part.layout is torch.strided and part.device.type != "meta":
            parts.setdefault(part.untyped_storage()._cdata, part.untyped_storage())
    return parts


def count_state(net: nn.Module, optimizers: Any = ()) -> StateBytes:
    """Return the bytes that `net` and `optimizers` hold in this process.

    `optimizers` may be any objects that hold tensors: optimizers, engines, lists of them. Parameters include buffers
    and the copies that DeepSpeed cuts its partitions from. A tensor of an optimizer is a gradient if an attribute on
    its path is named `grad` or `ipg` (DeepSpeed), else optimizer state. Storages of parameters count in neither.
    """
    parameters = storages([*net.parameters(), *net.buffers()])
    for parameter in net.parameters():  # ZeRO stage 3: the partition, and what remains of the gathered parameter
        parameters |= storages([parameter.data] if hasattr(parameter, "ds_tensor") else [])
    gradients = storages(p.grad for p in net.parameters() if p.grad is not None)
    state: dict[int, torch.UntypedStorage] = {}
    for path, tensor in _walk(optimizers):
        (gradients if "grad" in path or "ipg" in path else state).update(storages([tensor]))
    gradients = {key: storage for key, storage in gradients.items() if key not in parameters}
    state = {key: storage for key, storage in state.items() if key not in parameters and key not in gradients}
    return StateBytes(
        *(sum(storage.nbytes() for storage in group.values()) for group in (parameters, gradients, state))
    )


def _walk(root: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor below `root`, with the path of attributes and keys to it."""
    queue: deque[tuple[str, Any]] = deque([("", root)])
    seen: set[int] = set()
    while queue:
        path, value = queue.popleft()
        if isinstance(value, nn.Module) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield path, value
            if value.grad is not None:
                yield f"{path}.grad", value.grad
        elif isinstance(value, Mapping):
            queue.extend((f"{path}.{key}" if isinstance(key, str) else path, item) for key, item in value.items())
        elif isinstance(value, list | tuple | set | deque):
            queue.extend((path, item) for item in value)
        elif type(value).__module__.startswith(_WALKED) and hasattr(value, "__dict__"):
            queue.extend((f"{path}.{name}", item) for name, item in vars(value).items() if name != "lightning_module")


class SavedActivations:
    """Counts the tensors that autograd saves for backward, by `torch.autograd.graph.saved_tensors_hooks`.

    A context manager. `bytes` is what is saved now, `peak` the most so far. A storage counts once; those of `data` (a
    batch) and of `net`'s parameters and buffers do not count, gathered shards included. Checkpointed segments count
    with their inputs only: `PeakMemory` includes their recomputation.
    """

    def __init__(self, net: nn.Module, data: Iterable[Tensor] = ()) -> None:
        self.net, self.data, self.peak = net, list(data), 0
        self._own: set[int] = set()
        self._kept: weakref.WeakSet[_Kept] = weakref.WeakSet()

    @property
    def bytes(self) -> int:
        """Return the bytes saved now. Storages emptied since, as gathered parameters are, count as 0."""
        saved = {item.key: item.storage for item in self._kept if item.key not in self._own}
        return sum(storage.nbytes() for storage in saved.values())

    def __enter__(self) -> "SavedActivations":
        self._own = set(storages([*self.net.parameters(), *self.net.buffers(), *self.data]))
        # Registered last, so that it runs after a strategy has gathered the module's parameters.
        self._handles = [module.register_forward_pre_hook(self._note) for module in self.net.modules()]
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()

    def look(self) -> int:
        """Return the bytes saved now, and update `peak`."""
        now = self.bytes
        self.peak = max(self.peak, now)
        return now

    def _note(self, module: nn.Module, args: Any) -> None:
        self._own |= set(storages(p.data for p in module.parameters(recurse=False) if not is_sharded(p)))

    def _pack(self, tensor: Tensor) -> Any:
        item = _Kept(tensor)
        self._kept.add(item)
        self.look()
        return item


class _Kept:
    """A tensor that autograd saves; it lives as long as autograd keeps it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.storage = local(tensor).untyped_storage()
        self.key = self.storage._cdata


class PeakMemory(TorchDispatchMode):
    """Measures the peak memory of this process's tensors inside `with`, since the last `reset`.

    On a GPU this is `torch.cuda.max_memory_allocated`. A CPU has no such counter: every storage that an operation
    returns is recorded, and the sizes of the living ones are added up after each operation. This leaves out the
    workspace of operations, what is not a tensor, and earlier storages except those of `known`.
    """

    def __init__(self, device: torch.device, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.device = device
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._peak = 0
        self._see(known)

    @property
    def bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        total, gone = 0, []
        for key, reference in self._live.items():
            storage = reference()
            if storage is None:
                gone.append(key)
            else:
                total += storage.nbytes()
        for key in gone:
            del self._live[key]
        return total

    @property
    def peak(self) -> int:
        """Return the most bytes since `reset`."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return max(self._peak, self.bytes)

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._peak = self.bytes

    def __enter__(self) -> "PeakMemory":
        if self.device.type != "cuda":
            super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.device.type != "cuda":
            super().__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types if kind is not Tensor):
            return NotImplemented  # a DTensor: its operations on shards arrive here one by one
        result = func(*args, **(kwargs or {}))
        self._see(torch.utils._pytree.tree_leaves(result))
        self._peak = max(self._peak, self.bytes)
        return result

    def _see(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor) and value.device.type == self.device.type:
                for key, storage in storages([value]).items():
                    self._live[key] = weakref.ref(storage)


class ParamCount(NamedTuple):
    """Numbers of scalars, each parameter once."""

    total: int
    non_zero: int


def count_parameters(net: nn.Module) -> ParamCount:
    """Count `net`'s parameters; a collective if sharded. Synchronizes the device once per parameter."""
    parameters = list(net.parameters())
    non_zero = sum(int(whole(parameter).count_nonzero()) for parameter in parameters)
    return ParamCount(sum(parameter.numel() for parameter in parameters), non_zero)


def file_size(path: Path) -> tuple[int, int]:
    """Return the bytes of a file or folder on disk, and after gzip (by file), which shows unstructured zeros."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    sizes = [(file.stat().st_size, len(gzip.compress(file.read_bytes(), 6, mtime=0))) for file in files]
    return sum(size for size, _ in sizes), sum(gzipped for _, gzipped in sizes)
