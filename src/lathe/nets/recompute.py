"""Activation checkpointing and offloading, `trainer.activation_checkpointing`.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174; offloading: Rhu et al. 2016,
"vDNN", arXiv:1602.08124. Fewer activations stay on the device; the backward pass recomputes them or copies them back
from the host. Losses and gradients are the same; a step costs up to one more forward pass, or the copies.
"""

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from lathe.errors import ArgumentError, did_you_mean
from lathe.nets.blocks import Blocks, blocks_of, run

KEY = "activation_checkpointing"
AWAY = {"cuda"}  # types of devices with their own memory


def apply(net: nn.Module, how: str | None) -> None:
    """Checkpoint the blocks of `net` in place; names of parameters and modules do not change.

    For a net without `blocks` these are its repeated children, such as the layers of a transformer.

    `none` (or None) stores all activations, and undoes earlier calls. `blocks` stores only the input of each block;
    `every_<n>` does that for the blocks 0, n, 2n, ...; `sqrt` stores the inputs of about sqrt(number of blocks)
    segments. `offload` recomputes nothing: the blocks' activations are moved to the host's memory between the passes.
    Blocks that a pipeline has replaced by `nn.Identity` are not counted. It acts in training mode with gradients.
    """
    mode = "none" if how is None else str(how)
    interval = None if mode in ("none", "sqrt") else 1  # of the blocks that are patched
    if re.fullmatch(r"every_[1-9]\d*", mode):
        interval = int(mode.removeprefix("every_"))
    elif mode not in ("none", "blocks", "sqrt", "offload"):
        hint = did_you_mean(mode, ("none", "blocks", "every_2", "sqrt", "offload"), "every_<n> takes any n.")
        raise ArgumentError(f"{KEY}={mode}: {hint}")
    all_blocks = blocks_of(net) if hasattr(net, "blocks") else repeated_children(net)
    blocks = list(dict.fromkeys(own_blocks(all_blocks)))  # a net may run the same block twice
    name = type(net).__name__
    if mode != "none" and not blocks:
        raise ArgumentError(f"{KEY}={mode} acts on a net's repeated blocks, and {name} has no `blocks`: set none.")
    if interval is not None and interval > len(all_blocks):
        raise ArgumentError(f"{KEY}={mode}: {name} has {len(all_blocks)} blocks: take an n of at most that.")
    chain = getattr(net, "blocks", None)
    if mode == "sqrt" and not isinstance(chain, Blocks):
        raise ArgumentError(f"{KEY}=sqrt requires {name}.blocks to be a lathe.nets.Blocks. Use {KEY}=blocks.")
    for block in blocks:  # undo earlier calls
        patched = block.__dict__.get("forward")
        if isinstance(patched, functools.partial) and patched.func is _forward:
            del block.forward
            if patched.args[1] is not None:
                block.forward = patched.args[1]
    if isinstance(chain, Blocks):
        chain.in_segments = mode == "sqrt"
    for block in blocks[::interval] if interval is not None else []:
        block.forward = functools.partial(_forward, block, block.__dict__.get("forward"), mode == "offload")


def repeated_children(net: nn.Module) -> list[nn.Module]:
    """Return the largest group of two or more children of one class with children of their own, as a transformer's
    layers in a ModuleList; empty without one.
    """
    families = [list(module.children()) for module in net.modules()]
    alike = [family for family in families if len({type(child) for child in family}) == 1 < len(family)]
    deep = [family for family in alike if any(True for _ in family[0].children())]
    return max(deep, key=lambda family: sum(p.numel() for child in family for p in child.parameters()), default=[])


def own_blocks(blocks: Sequence[nn.Module] | nn.ModuleList) -> list[nn.Module]:
    """Return the blocks that compute; a pipeline replaces those of other ranks by `nn.Identity`."""
    return [block for block in blocks if not isinstance(block, nn.Identity)]


def check_device(how: str | None, device_type: str) -> None:
    """Raise ArgumentError for `offload` if activations are in the host's memory already."""
    if how == "offload" and device_type not in AWAY:
        raise ArgumentError(f"{KEY}={how} moves activations from a GPU to the host; this run is on {device_type}.")


def _forward(block: nn.Module, own: Any, offloads: bool, *args: Any, **kwargs: Any) -> Any:
    """Run a block with recomputation or offloading, in place of `block.forward` and within the block's hooks.

    `own` is the object's own forward, or None if its class has it. A partial of a module-level function survives
    deepcopy, pickle and a change of class (as by fully_shard), but a closure over the old `forward` does not.
    """
    forward = functools.partial(type(block).forward, block) if own is None else own
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    if not offloads:
        return recomputed([block], forward, *args, **kwargs)
    with Offloaded(block):
        return forward(*args, **kwargs)


class Offloaded(save_on_cpu):
    """Moves the activations that autograd saves for `block` to page-locked memory of the host.

    The backward pass copies each tensor back when it needs it. Copies run in order on the stream of the computation, so
    values are the same and a step takes longer by the copies. Unlike torch's context, this one leaves parameters and
    buffers of the block on the device: they stay there anyway, and copies would need more memory.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__(pin_memory=True)  # page-locked if there is a GPU
        move, fetch = self.pack_hook, self.unpack_hook
        stay = {_place(tensor) for tensor in (*block.parameters(), *block.buffers())}

        def pack(tensor: Tensor) -> Any:
            return tensor if _place(tensor) in stay else move(tensor)

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else fetch(packed)

        self.pack_hook, self.unpack_hook = pack, unpack


def _place(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which its views share."""
    return tensor.untyped_storage().data_ptr()


def run_in_segments(chain: nn.ModuleList, x: Tensor) -> Tensor:
    """Run a chain of n blocks in round(sqrt(n)) segments of nearly equal lengths, and store only their inputs."""
    blocks = own_blocks(chain)
    count = round(len(blocks) ** 0.5)
    for index in range(count):
        segment = blocks[index * len(blocks) // count : (index + 1) * len(blocks) // count]
        x = recomputed(segment, lambda x, segment=segment: run(segment, x), x)
    return x


def recomputed(blocks: Sequence[nn.Module], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)` without storing activations: the backward pass calls it again.

    The first argument is copied for each call, because a block may write into it. The second call uses the random
    numbers, autocast and buffers of `blocks` of the first: otherwise a BatchNorm would count each batch twice.
    """

    def copied(x: Any, *rest: Any, **kwargs: Any) -> Any:
        return function(x.clone() if isinstance(x, Tensor) else x, *rest, **kwargs)

    if torch.compiler.is_compiling() or not any(True for block in blocks for _ in block.buffers()):
        # a compiler recomputes within its graph, which has the update of a buffer once
        return checkpoint(copied, *args, use_reentrant=False, **kwargs)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _BuffersOf(blocks)

    return checkpoint(copied, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class _BuffersOf(AbstractContextManager[None]):
    """In this context, modules use copies of their buffers as of construction; afterwards their own again."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        modules = dict.fromkeys(module for block in blocks for module in block.modules())
        self.was = [
            (module, name, buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.own: list[tuple[nn.Module, str, Tensor | None]] = []

    def __enter__(self) -> None:
        self.own = [(module, name, module._buffers[name]) for module, name, _ in self.was]
        for module, name, buffer in self.was:
            module._buffers[name] = buffer.clone()  # a graph with retain_graph may be recomputed again

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module, name, buffer in self.own:
            module._buffers[name] = buffer
