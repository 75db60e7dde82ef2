"""Bytes of memory that a training process holds: counted from the tensors that are there, by storage, never from a
formula.

A storage counts once, however many tensors view it. A DTensor counts with the shard that this process holds;
DeepSpeed's partitions count where its optimizer keeps them.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lathe.measure.shards import is_sharded, local

_WALKED = ("torch.optim", "torch.amp", "deepspeed", "lathe.optim")  # whose objects may hold state


@dataclass(frozen=True)
class StateBytes:
    """Bytes of this process's share of what lasts from step to step; `gradients` are those that exist at the moment of
    counting.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def model(self) -> int:
        """Parameters and optimizer state: what sharding is to divide."""
        return self.parameters + self.optimizer


def storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages behind this process's parts of `tensors`, each once, by a key that stays with a storage."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        part = local(tensor)
        if part.layout is torch.strided and part.device.type != "meta":
            found.setdefault(part.untyped_storage()._cdata, part.untyped_storage())
    return found


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind this process's parts of `tensors`; what several share counts once."""
    return sum(storage.nbytes() for storage in storages(tensors).values())


def count_state(net: nn.Module, optimizers: Any = ()) -> StateBytes:
    """What `net` and `optimizers` (objects that hold tensors at any depth: optimizers, engines, lists of them) hold in
    this process.

    Parameters include buffers, and the copies that DeepSpeed's partitions are cut from. A tensor below an optimizer
    counts as a gradient if an attribute on the way to it says so (`grad`, DeepSpeed's `ipg`), else as optimizer state.
    What is a parameter's memory is neither.
    """
    parameters = storages([*net.parameters(), *net.buffers()])
    for parameter in net.parameters():  # ZeRO stage 3: the partition, and what is left of the gathered parameter
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
    """Every tensor below `root`, with the names of the attributes and keys on the way."""
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
    """Counts what autograd keeps for the backward pass, inside `with`, by `torch.autograd.graph.saved_tensors_hooks`.

    `bytes` is what is kept now, `peak` the most that was kept at a moment; storages count once, and the memory of
    `net`'s parameters and buffers not at all, shards that are gathered for a while included. Segments that are
    recomputed show with their inputs alone: what the second pass makes for a moment is in `PeakMemory`. `data` (a
    batch) does not count either.
    """

    def __init__(self, net: nn.Module, data: Iterable[Tensor] = ()) -> None:
        self.net, self.data, self.peak = net, list(data), 0
        self._own: set[int] = set()
        self._kept: weakref.WeakSet[_Kept] = weakref.WeakSet()

    @property
    def bytes(self) -> int:
        """Bytes kept at this moment. A storage that was emptied meanwhile, as gathered parameters are, counts
        nothing.
        """
        kept = {item.key: item.storage for item in self._kept if item.key not in self._own}
        return sum(storage.nbytes() for storage in kept.values())

    def __enter__(self) -> "SavedActivations":
        self._own = set(storages([*self.net.parameters(), *self.net.buffers(), *self.data]))
        # Registered last, so that it runs when a strategy has gathered the module's parameters.
        self._handles = [module.register_forward_pre_hook(self._note) for module in self.net.modules()]
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()

    def look(self) -> int:
        """Bytes kept at this moment, which count for `peak`."""
        now = self.bytes
        self.peak = max(self.peak, now)
        return now

    def _note(self, module: nn.Module, args: Any) -> None:
        self._own |= set(storages(p.data for p in module.parameters(recurse=False) if not is_sharded(p)))

    def _pack(self, tensor: Tensor) -> Any:
        kept = _Kept(tensor)
        self._kept.add(kept)
        self.look()
        return kept


class _Kept:
    """A tensor that autograd keeps; it lives as long as autograd wants it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.storage = local(tensor).untyped_storage()
        self.key = self.storage._cdata


def _unpack(kept: _Kept) -> Tensor:
    return kept.tensor


class PeakMemory(TorchDispatchMode):
    """The most bytes that tensors of this process take at a moment, inside `with`, and since the last `reset`.

    On a GPU, what the caching allocator says (`torch.cuda.max_memory_allocated`). A CPU has no such counter: every
    storage that comes out of an operation is noted, and after each operation those that still live are added up, with
    their size of that moment. An operation's own workspace, and what is not a tensor, are not in it; neither are
    storages that were there before (`known` adds those of the given tensors).
    """

    def __init__(self, device: torch.device, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.device = device
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._peak = 0
        self._see(known)

    @property
    def bytes(self) -> int:
        """Bytes at this moment."""
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
        """The most since `reset`."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return max(self._peak, self.bytes)

    def reset(self) -> None:
        """The peak is sought anew from here on."""
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
            return NotImplemented  # a DTensor: its own operations on shards come here one by one
        result = func(*args, **(kwargs or {}))
        self._see(torch.utils._pytree.tree_leaves(result))
        self._peak = max(self._peak, self.bytes)
        return result

    def _see(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor) and value.device.type == self.device.type:
                for key, storage in storages([value]).items():
                    self._live[key] = weakref.ref(storage)
