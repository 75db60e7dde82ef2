"""Whether this processor sums products of 8-bit integers exactly, in oneDNN's kernels."""

from functools import cache

import torch
from torch import Tensor

LARGEST = 2**15 - 1  # of the 16 bits that two products are added in where they are not exact
SIDES = (8, 64)  # of the product that is tried


@cache
def exact() -> bool:
    """Whether the largest products sum to what they are. On x86 without VNNI oneDNN adds pairs of them in 16 bits and
    cuts off what does not fit. Measured, since the processor's name says less than what its kernels do (oneDNN's
    developer guide, "Nuances of int8 computations").
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
    """Whether two products of these int8 weights with activations from 0 to `top` are exact on every processor."""
    return 2 * top * int(integers.abs().max()) <= LARGEST
