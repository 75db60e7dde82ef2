"""BatchNorm's running statistics, estimated anew after a net's weights or shapes have changed."""

from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lathe.compression.modes import evaluated


def reestimate_batchnorm(net: nn.Module, batches: Iterable[Tensor], limit: int | None = 15) -> int:
    """Sets the running mean and variance of each BatchNorm of `net` to their plain averages over `batches`, in place.

    A batch is the net's input, `[batch, ...]`, on the net's device; at most `limit` are read (null: all). Weights stay
    as they are, and every module is put back into the mode it was in; all but the BatchNorms run in eval mode, so that
    dropout draws nothing. Returns the number of batches that were used, 0 for a net without such layers, of which
    nothing is then read. The recipe is that of Izmailov et al. 2018, arXiv:1803.05407
    (`torch.optim.swa_utils.update_bn`); Li et al. 2020, arXiv:2007.02491, show how much of a pruned net's accuracy it
    brings back before any training.
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
                norm.momentum = None  # a cumulative average
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
