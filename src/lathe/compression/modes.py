"""A net asked in evaluation mode, and left as it was."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.utils.hooks import RemovableHandle


@contextmanager
def evaluated(net: nn.Module, hooks: Iterable[RemovableHandle] = ()) -> Iterator[None]:
    """`net` in evaluation mode; behind it each module has its own mode again, and these hooks are gone."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training
