"""Packs weights of convolutions in oneDNN's layout at compile time, also for dynamic batches.

Inductor packs them only if every shape is static; otherwise each call reorders them, which is half of the time of a
ResNet-18 at batch 1. The layout hardly depends on the batch, and oneDNN reorders it if another is better.
"""

from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

BATCH = 1  # layouts are chosen for this batch, at which weights take most of the time


class PackConvolutions(CustomGraphPass):
    """Inductor's hook `post_grad_custom_pre_pass`: after freezing, before convolutions are fused."""

    def uuid(self) -> Any:
        """Return inductor's cache key."""
        return get_hash_for_files((__file__,))

    def __call__(self, graph: fx.Graph) -> None:
        net, ops = graph.owning_module, torch.ops.mkldnn
        if not torch.backends.mkldnn.is_available():
            return
        for number, node in enumerate(graph.find_nodes(op="call_function", target=ops._convolution_pointwise.default)):
            x, stored, _, padding, stride, dilation, groups = node.args[:7]
            weight = attrgetter(str(stored.target))(net) if stored.op == "get_attr" else None
            sides = x.meta["val"].shape[1:]
            if weight is None or weight.is_mkldnn or not _keeps_layout(sides):
                continue
            with torch.utils._python_dispatch._disable_current_modes():  # a real tensor, not a fake one
                packed = ops._reorder_convolution_weight(
                    weight.detach(), padding, stride, dilation, groups, [BATCH, *sides]
                )
            name = f"_packed_convolution_{number}"
            net.register_buffer(name, packed)  # type: ignore[union-attr]
            with graph.inserting_before(node):
                constant = graph.get_attr(name)
            constant.meta.update(stored.meta)
            node.update_arg(1, constant)
            if not stored.users:
                graph.erase_node(stored)


def _keeps_layout(sides: Any) -> bool:
    """Return whether channels and sides are static and distinguish channels-last from contiguous.

    If they don't, as with a single channel, inductor expects a contiguous output, but a convolution with packed weights
    returns a channels-last one.
    """
    if not all(isinstance(side, int) for side in sides):
        return False
    channels, *pixels = sides
    return channels > 1 and any(side > 1 for side in pixels)
