"""Activations in the host's memory between the forward and the backward pass."""

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu


class Offloaded(save_on_cpu):
    """Within it, what autograd keeps for the backward pass of `block` is copied into page-locked memory of the host and
    its place on the device is free; the backward pass copies each tensor back when it comes to it. Copies go in the
    order of the computation, on its stream, so that values are the same and a step takes the time of the copies more.

    torch's own context moves everything that is kept. Parameters and buffers of the block stay where they are here:
    they are on the device anyway, and a copy of them would only take room twice.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__(pin_memory=True)  # page-locked where there is a GPU
        move, fetch = self.pack_hook, self.unpack_hook
        stay = {_place(tensor) for tensor in (*block.parameters(), *block.buffers())}

        def pack(tensor: Tensor) -> Any:
            return tensor if _place(tensor) in stay else move(tensor)

        def unpack(kept: Any) -> Tensor:
            found: Tensor = kept if isinstance(kept, Tensor) else fetch(kept)
            return found

        self.pack_hook, self.unpack_hook = pack, unpack


def _place(tensor: Tensor) -> int:
    """The address of its storage, which a view of it has too."""
    return tensor.untyped_storage().data_ptr()
