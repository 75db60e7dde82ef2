"""Forward passes that do not change a net or its input, and those that re-estimate BatchNorm's statistics."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from lathe.measure.calls import Call, run


def copy_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Copy the input of a net that may modify it in place; a forward pre-hook."""
    return (args[0].clone(), *args[1:]) if args and isinstance(args[0], Tensor) else None


@contextmanager
def evaluated(net: nn.Module, hooks: Iterable[RemovableHandle] = ()) -> Iterator[None]:
    """Run `net` in eval mode on copies of its input; then restore modes and remove `hooks`."""
    modes = [(module, module.training) for module in net.modules()]
    copying = net.register_forward_pre_hook(copy_input)
    net.eval()
    try:
        yield
    finally:
        for hook in (copying, *hooks):
            hook.remove()
        for module, training in modes:
            module.training = training


def without_memory(net: nn.Module) -> nn.Module:
    """Return a copy of `net` on the meta device, without copying parameters and buffers; tied weights stay tied."""
    memo: dict[int, Any] = {id(buffer): buffer.detach().to("meta") for buffer in net.buffers()}
    memo |= {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in net.parameters()}
    return copy.deepcopy(net, memo)


def uncompiled(net: nn.Module) -> AbstractContextManager[Any]:
    """Run a compiled net as written within the context: hooks run, and other shapes do not recompile."""
    # set_stance imports the compiler, which takes seconds
    return torch.compiler.set_stance("force_eager") if is_compiled(net) else nullcontext()


def is_compiled(net: nn.Module) -> bool:
    """Return whether torch.compile compiles `net` or a part of it."""
    return any(module._compiled_call_impl is not None for module in net.modules())


def reestimate_batchnorm(net: nn.Module, batches: Iterable[Tensor | Call], limit: int | None = 15) -> int:
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
                run(net, batch)
                count += 1
    finally:
        for norm, momentum in momenta.items():
            norm.momentum = momentum
    return count
