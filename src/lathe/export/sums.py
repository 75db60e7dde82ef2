"""Checks whether oneDNN's kernels sum products of 8-bit integers exactly on this processor."""

from functools import cache

import torch
from torch import Tensor

LARGEST = 2**15 - 1  # the largest sum of two products in the 16 bits of inexact kernels
SIDES = (8, 64)  # of the weight in the test


@cache
def exact() -> bool:
    """Return whether the largest products are summed exactly.

    On x86 without VNNI, oneDNN adds pairs of products in 16 bits, which saturate. This is measured, because the
    processor's name does not determine its kernels (oneDNN's developer guide, "Nuances of int8 computations").
    """
    if not torch.backends.mkldnn.is_available():
        return True  # there are no such kernels
    outputs, inputs = SIDES
    ops = torch.ops.onednn
    x, weight = torch.full((1, inputs), 255, dtype=torch.uint8), torch.full(SIDES, 127, dtype=torch.int8)
    scales, zeros = torch.ones(outputs), torch.zeros(outputs, dtype=torch.int64)
    packed = ops.qlinear_prepack(weight, [1, inputs])
    found: Tensor = ops.qlinear_pointwise(x, 1.0, 0, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return bool((found == 255 * 127 * inputs).all())


def fits(integers: Tensor, top: int) -> bool:
    """Return whether pairs of products with activations 0..top fit into 16 bits."""
    return 2 * top * int(integers.abs().max()) <= LARGEST
