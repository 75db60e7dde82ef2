"""The last line of an optimizer's step."""

from torch import Tensor


def descend(parameter: Tensor, direction: Tensor, rate: float | Tensor) -> None:
    """Takes `rate` times `direction` from `parameter`, in place. A compiled step has its rate in a tensor, which is not
    read: reading one makes a GPU's queue wait, and can't be part of a CUDA graph.
    """
    if isinstance(rate, Tensor):
        parameter.sub_(direction * rate)
    else:
        parameter.add_(direction, alpha=-rate)
