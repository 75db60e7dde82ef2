"""Hooks that a part of the user's own has put on a net, which may look at every step, or log."""

from typing import Any

import torch
from torch import nn


def foreign_hook(module: nn.Module) -> str | None:
    """A hook on one of its modules or parameters that a part of the user's own has put there, which may log or look at
    anything as well; None if there is none.
    """
    everywhere = vars(torch.nn.modules.module)
    places = [("every module", everywhere, "_global")]
    places += [(name or "the module", vars(part), "") for name, part in module.named_modules()]
    for name, held, start in places:
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
            found = next((hook for hook in held[start + kind].values() if _is_foreign(hook)), None)
            if found is not None:
                return f"{_name(found)}, a hook on {name},"
    for name, parameter in module.named_parameters():
        kept = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        for hook in (hook for hooks in kept for hook in (hooks or {}).values()):
            if _is_foreign(hook):
                return f"{_name(hook)}, a hook on {name},"
    return None


def _is_foreign(hook: Any) -> bool:
    made = getattr(hook, "func", hook)  # of a functools.partial
    home = getattr(made, "__module__", None) or type(made).__module__
    return not home.startswith(("lathe.", "torch.", "lightning."))


def _name(hook: Any) -> str:
    made = getattr(hook, "func", hook)
    return str(getattr(made, "__qualname__", type(made).__qualname__))
