"""Hooks that a user has registered on a net, which may look at every step, or log."""

from typing import Any

import torch
from torch import nn

# Hooks are functions and closures, which carry no attribute: only their package shows whose they are.
LIBRARIES = (f"{__name__.partition('.')[0]}.", "torch.", "lightning.")


def foreign_hook(module: nn.Module) -> str | None:
    """Describe a user's hook on one of the modules or parameters; None if there is none."""
    everywhere = vars(torch.nn.modules.module)
    places = [("every module", everywhere, "_global")]
    places += [(name or "the module", vars(part), "") for name, part in module.named_modules()]
    for name, attributes, prefix in places:
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
            hook = next((hook for hook in attributes[prefix + kind].values() if _is_foreign(hook)), None)
            if hook is not None:
                return f"{_name(hook)}, a hook on {name},"
    for name, parameter in module.named_parameters():
        registered = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        for hook in (hook for hooks in registered for hook in (hooks or {}).values()):
            if _is_foreign(hook):
                return f"{_name(hook)}, a hook on {name},"
    return None


def _is_foreign(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # of a functools.partial
    home = getattr(function, "__module__", None) or type(function).__module__
    return not home.startswith(LIBRARIES)


def _name(hook: Any) -> str:
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__qualname__", type(function).__qualname__))
