"""A module of torch as a function of arrays: what targets that torch runs have in common."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


def on_arrays(call: Callable[[Tensor], Tensor], threads: int | None = None) -> Callable[[Array], Array]:
    """`call` without gradients. `threads` is torch's number of threads during each call; None leaves it as it is."""

    def forward(x: Array) -> Array:
        was = torch.get_num_threads()
        if threads is not None and threads != was:
            torch.set_num_threads(threads)
        try:
            with torch.no_grad():
                # tensors can't have what a client's buffer may be: read-only, or read backwards
                found: Array = call(torch.from_numpy(np.require(x, requirements=["C", "W"]))).numpy()
            return found
        finally:
            if threads is not None and threads != was:
                torch.set_num_threads(was)

    return forward
