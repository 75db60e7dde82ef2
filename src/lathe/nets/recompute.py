"""Activation checkpointing and offloading, `trainer.activation_checkpointing`.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174; offloading: Rhu et al. 2016,
"vDNN", arXiv:1602.08124. Fewer activations stay on the device; the backward pass recomputes them or copies them back
from the host. Losses and gradients are the same; a step costs up to one more forward pass, or the copies.
"""

import functools
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from lathe.errors import ArgumentError, did_you_mean
from lathe.nets.blocks import Blocks, blocks_of, own_blocks, recomputed, repeated_children

KEY = "activation_checkpointing"
WORDS = ("none", "blocks", "every_2", "sqrt", "offload")  # every_<n> takes any n
OFFLOAD = "offload"
AWAY = {"cuda"}  # types of devices with their own memory


def apply(net: nn.Module, how: str | None) -> None:
    """Checkpoint the blocks of `net` in place; names of parameters and modules do not change.

    For a net without `blocks` these are its repeated children, such as the layers of a transformer.

    `none` (or None) stores all activations, and undoes earlier calls. `blocks` stores only the input of each block;
    `every_<n>` does that for the blocks 0, n, 2n, ...; `sqrt` stores the inputs of about sqrt(number of blocks)
    segments. `offload` recomputes nothing: the blocks' activations are moved to the host's memory between the passes.
    Blocks that a pipeline has replaced by `nn.Identity` are not counted. It acts in training mode with gradients.

    Raises ArgumentError for another word, a net without blocks, an n above their number, and `sqrt` for a net whose
    `blocks` is not a `lathe.nets.Blocks`.
    """
    word = "none" if how is None else str(how)
    every = _every(word)
    every_block = blocks_of(net) if hasattr(net, "blocks") else repeated_children(net)
    blocks = list(dict.fromkeys(own_blocks(every_block)))  # a net may run the same block twice
    name = type(net).__name__
    if word != "none" and not blocks:
        lack = "names no `blocks`" if not hasattr(net, "blocks") else "has none"
        if word == OFFLOAD:
            raise ArgumentError(f"{KEY}={word} moves what repeated blocks keep, but {name} {lack}: set {KEY}=none.")
        raise ArgumentError(f"{KEY}={word} recomputes a net's repeated blocks, but {name} {lack}: set {KEY}=none.")
    if every is not None and every > len(every_block):
        raise ArgumentError(f"{KEY}={word}: {name} has {len(every_block)} blocks: take an n of at most that.")
    chain = getattr(net, "blocks", None)
    if word == "sqrt" and not isinstance(chain, Blocks):
        raise ArgumentError(
            f"{KEY}=sqrt runs the blocks in segments, which {name} does not let it: make its `blocks` a "
            f"lathe.nets.Blocks and call that in forward, or set {KEY}=blocks."
        )
    for block in blocks:
        _keep(block)
    if isinstance(chain, Blocks):
        chain.in_segments = word == "sqrt"
    function = _offloaded if word == OFFLOAD else _forward
    for block in blocks[::every] if every is not None else []:
        block.forward = functools.partial(function, block, block.__dict__.get("forward"))


def check_device(how: str | None, device_type: str) -> None:
    """Raise ArgumentError for `offload` if activations are in the host's memory already."""
    if how == OFFLOAD and device_type not in AWAY:
        raise ArgumentError(
            f"{KEY}={how} moves activations from a GPU to the host's memory, and this run is on {device_type}, where "
            f"it has no effect: set {KEY}=blocks, which computes them again, or none."
        )


def _every(word: str) -> int | None:
    """Return 1 for `blocks` and `offload`, n for `every_<n>`, None for the words that patch no block."""
    if word in ("none", "sqrt"):
        return None
    if word in ("blocks", OFFLOAD):
        return 1
    if re.fullmatch(r"every_[1-9]\d*", word):
        return int(word.removeprefix("every_"))
    if re.fullmatch(r"every_-?\d+(\.\d+)?", word):
        raise ArgumentError(f"{KEY}={word}: n must be a whole number of at least 1, such as every_2.")
    hint = did_you_mean(word, WORDS, "choose none, blocks, every_<n> (such as every_2), sqrt or offload.")
    raise ArgumentError(f"{KEY}={word}: {hint}")


def _forward(block: nn.Module, own: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a block with recomputation, in place of `block.forward` and within the block's hooks.

    `own` is the object's own forward, or None if its class has it. A partial of a module-level function survives
    deepcopy, pickle and a change of class (as by fully_shard), but a closure over the old `forward` does not.
    """
    forward = functools.partial(type(block).forward, block) if own is None else own
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return recomputed([block], forward, *args, **kwargs)


def _offloaded(block: nn.Module, own: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a block as `_forward`, with its activations offloaded."""
    forward = functools.partial(type(block).forward, block) if own is None else own
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    with Offloaded(block):
        return forward(*args, **kwargs)


def _keep(block: nn.Module) -> None:
    """Undo `apply` for a block."""
    patched = block.__dict__.get("forward")
    if isinstance(patched, functools.partial) and patched.func in (_forward, _offloaded):
        del block.forward
        if patched.args[1] is not None:
            block.forward = patched.args[1]


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

        def unpack(kept: Any) -> Tensor:
            found: Tensor = kept if isinstance(kept, Tensor) else fetch(kept)
            return found

        self.pack_hook, self.unpack_hook = pack, unpack


def _place(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which its views share."""
    return tensor.untyped_storage().data_ptr()
