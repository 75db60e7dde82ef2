"""Base class of tasks: hooks with defaults, and `load_from_checkpoint` as Lightning's users call it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn

import lathe
from lathe.errors import require

# Hooks are functions and closures, which carry no attribute: only their package shows whose they are.
LIBRARIES = (f"{__name__.partition('.')[0]}.", "torch.", "lightning.")


class ModuleProtocol(LightningModule):
    """A LightningModule around a `net`, whose checkpoints hold the net's own plain names.

    `standard_step = True` in the body of a class states that its step reads inputs and targets of the batch, logs only
    the declared metrics and looks at no loop: several steps may run per call (`trainer.steps_per_call`). A subclass
    states it again, as it may do more.
    """

    net: nn.Module
    standard_step = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.standard_step = vars(cls).get("standard_step", False)

    @property
    def driven(self) -> LightningModule:
        """Return the module for the Trainer: the task, or the LightningModule that it wraps."""
        return self

    @property
    def core(self) -> nn.Module:
        """Return the module that is compressed, compiled, sharded and exported."""
        return self.net

    @property
    def core_name(self) -> str:
        """Return the name of `core` in the task."""
        return "net"

    def print_core(self) -> None:
        """Print which submodule is the core, if that was not given."""

    @property
    def logs_more(self) -> bool:
        """Return whether `self.log` may report names that the task does not declare."""
        return not self.standard_step

    def own_hook(self) -> str | None:
        """Return a description of a user's hook on the modules or parameters, if there is one."""
        return foreign_hook(self.driven)

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """Raise UserError if the net does not fit the facts of the data; called on the CPU before data is touched."""

    def take_logits(self, facts: Mapping[str, Any], train: bool) -> None:
        """Reduce the net's outputs to logits, in a task that takes only these."""

    def check_training(self) -> None:
        """Raise UserError if the task can't be trained with its arguments."""

    def check_run(self, cfg: Mapping[str, Any]) -> None:
        """Raise UserError if the task can't do what a configuration asks for; called before data is touched."""

    def own_callbacks(self) -> list[Callback]:
        """Return callbacks that the task needs."""
        return []

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]  # without Lightning's arguments for its own checkpoints
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Return the task with the weights and the structure of a checkpoint, without running code of the file.

        Without `net`, the task is rebuilt from the config.yaml of the checkpoint's run directory, under the rules of
        lathe.trust, in eval mode and without an optimizer. With `net`, the class is built from `net` and the other
        arguments, as Lightning does it; `strict=False` loads the weights that fit.

        Raises:
            UserError: no run directory is around the checkpoint, it is damaged, or it does not fit.
        """
        require(weights_only is not False, "weights_only=False: checkpoints are plain tensors; leave weights_only out.")
        path = Path(checkpoint_path)
        if "net" in kwargs:
            task = cls(**kwargs)
            lathe.restore(task.net, path, strict=strict is not False, key="checkpoint_path")
        else:
            given = ", ".join([*kwargs, *(["strict"] if strict is False else [])])
            require(not given, f"{given} requires net=, the net to load into. Without it, config.yaml decides.")
            require(path.exists(), f"checkpoint_path={path}: no such file.")
            home = path.resolve().parent.parent
            require(
                (home / "config.yaml").is_file(),
                f"checkpoint_path={path} is not in a run directory with config.yaml: pass net=, the net to load into.",
            )
            task = lathe.load(home, path.resolve().stem, key="checkpoint_path").task
            require(
                isinstance(task, cls),
                f"checkpoint_path={path} is of a {type(task).__name__}, not a {cls.__name__}: load it with its class.",
            )
        return task if map_location is None else task.to(map_location)


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
