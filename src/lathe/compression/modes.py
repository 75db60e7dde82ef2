"""Forward passes that do not change a net or its input."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


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


def uncompiled(net: nn.Module) -> AbstractContextManager[Any]:
    """Run a compiled net as written within the context: hooks run, and other shapes do not recompile."""
    # set_stance imports the compiler, which takes seconds
    compiled = any(module._compiled_call_impl is not None for module in net.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
