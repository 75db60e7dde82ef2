"""The last operation of an optimizer's step."""

from torch import Tensor


def descend(parameter: Tensor, direction: Tensor, rate: float | Tensor) -> None:
    """Subtract `rate` times `direction` from `parameter`, in place.

    In a compiled step `rate` is a tensor, which is not read: that would synchronize a GPU, and can't be in a CUDA
    graph.
    """
    if isinstance(rate, Tensor):
        parameter.sub_(direction * rate)
    else:
        parameter.add_(direction, alpha=-rate)
