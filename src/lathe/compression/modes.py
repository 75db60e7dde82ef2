"""Forward passes that leave a net and its input as they were."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def copy_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook for a net whose input is used again: the net gets a copy, which it may write into."""
    return (args[0].clone(), *args[1:]) if args and isinstance(args[0], Tensor) else None


@contextmanager
def evaluated(net: nn.Module, hooks: Iterable[RemovableHandle] = ()) -> Iterator[None]:
    """`net` in evaluation mode, with a copy of its input; at the end, modes are restored and `hooks` removed."""
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
