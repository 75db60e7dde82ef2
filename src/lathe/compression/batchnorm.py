"""Re-estimation of BatchNorm's running statistics after a net's weights or shapes have changed."""

from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lathe.compression.modes import evaluated


def reestimate_batchnorm(net: nn.Module, batches: Iterable[Tensor], limit: int | None = 15) -> int:
    """Set the running statistics of each BatchNorm to their averages over `batches`, in place.

    At most `limit` batches (None: all) of the net's input, `[batch, ...]` on the net's device, are read, and none
    without a BatchNorm. All other modules run in eval mode; modes are restored. Returns the number of batches. As in
    Izmailov et al. 2018, arXiv:1803.05407 (`torch.optim.swa_utils.update_bn`); Li et al. 2020, arXiv:2007.02491, show
    how much of a pruned net's accuracy it recovers without training.
    """
    norms = [module for module in net.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms:
        return 0
    momenta = {norm: norm.momentum for norm in norms}
    count = 0
    try:
        with evaluated(net), torch.no_grad():
            for norm in norms:
                norm.train()
                norm.momentum = None  # cumulative average
            for batch in islice(batches, limit):
                if count == 0:
                    for norm in norms:
                        norm.reset_running_stats()
                net(batch)
                count += 1
    finally:
        for norm, momentum in momenta.items():
            norm.momentum = momentum
    return count
