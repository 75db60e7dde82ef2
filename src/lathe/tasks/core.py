"""The core of a task: the net, or the submodule of a user's LightningModule that is compressed, compiled and exported.

A LightningModule's own step turns a batch into the core's arguments. `record_calls` runs it up to that call.
"""

import inspect
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils.hooks import RemovableHandle

from lathe.compression.modes import uncompiled
from lathe.data.transfer import stand_in
from lathe.errors import UserError, did_you_mean, is_user_file, require, user_location
from lathe.measure.calls import Call, unknown
from lathe.measure.flops import net_input
from lathe.tasks.module_protocol import ModuleProtocol

EXAMPLE = "example.pt"  # in a run directory: the core's arguments in the first batch
# methods of a module that do nothing while a call is recorded
_SILENT = ("log", "log_dict", "manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients")


class _Recorded(BaseException):
    """Ends a user's step at the call of the core; no `except Exception` of the step catches it."""


def find_core(module: nn.Module, name: str | None) -> str:
    """Return the name of the submodule that is the core: `name`, else the only child with parameters, else "".

    Raises:
        UserError: there is no submodule `name`.
    """
    children = [child for child, part in module.named_children() if any(True for _ in part.parameters())]
    if name is None:
        return children[0] if len(children) == 1 else ""
    known = dict(module.named_modules())
    require(
        name in known,
        f"model.core={name}: {type(module).__name__} has no such submodule; {did_you_mean(name, children or known)}",
    )
    return name


def core_of(module: nn.Module) -> nn.Module:
    """Return the core of a task or a LightningModule, and any other net itself."""
    task = vars(module).get("lathe_task", module)
    if isinstance(task, ModuleProtocol):
        return task.core
    if isinstance(module, LightningModule):  # under a plain Trainer
        children = dict(module.named_children())
        return children["net"] if "net" in children else module.get_submodule(find_core(module, None))
    return module


def is_foreign(module: nn.Module) -> bool:
    """Return whether a Trainer's module is a user's LightningModule, which declares neither loss nor metrics."""
    return not isinstance(module, ModuleProtocol)


def core_name(module: nn.Module) -> str:
    """Return the name of `core_of(module)` in a task's net: "" for the whole of it."""
    task = vars(module).get("lathe_task")
    return task.core_name if isinstance(task, ModuleProtocol) else ""


def record_calls(task: nn.Module, batches: Iterable[Any], limit: int = 1, split: str = "val") -> list[Call]:
    """Return the core's arguments for the first `limit` batches, which are on the task's device.

    For Lathe's tasks these are the net's input. A LightningModule's `validation_step`, in eval mode and without
    gradients, runs on each batch until it calls the core; `training_step` does where that is missing, or with
    split="train". `self.log` and optimizers do nothing meanwhile; random states and modes are restored.

    Raises:
        UserError: the step fails before it calls the core, does not call it, or passes something other than tensors
            and plain values.
    """
    given = vars(task).get("lathe_task", task)
    if isinstance(given, ModuleProtocol) and given.driven is given:
        return [Call((net_input(batch),)) for batch in islice(batches, limit)]
    module: Any = getattr(given, "driven", given)
    example = getattr(given, "example", None)
    if isinstance(example, str):
        device = next((parameter.device for parameter in module.parameters()), "cpu")
        return [Call.load(example).to(device)]
    with _quiet(module) as step_of:
        return [_record(module, step_of(split), batch, index) for index, batch in enumerate(islice(batches, limit))]


def _record(module: LightningModule, step: Callable[..., Any], batch: Any, index: int) -> Call:
    core, found, where = core_of(module), list[Call](), list[str]()

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(Call(args, kwargs))
        where.append(_caller())
        raise _Recorded

    handle = core.register_forward_pre_hook(keep, prepend=True, with_kwargs=True)
    place = f"{type(module).__name__}.{step.__name__}"
    try:
        step(*_arguments(step, batch, index))
    except _Recorded:
        pass
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            f"model.core: {place} raises {type(error).__name__} before it calls the core{user_location(error)}: "
            f"{reason}. Name a submodule that it calls earlier, or give model.example."
        ) from error
    finally:
        handle.remove()
    if not found:
        lines = f"{inspect.getsourcefile(step)}:{inspect.getsourcelines(step)[1]}"
        children = ", ".join(name for name, part in module.named_children() if any(True for _ in part.parameters()))
        raise UserError(
            f"model.core={core_name(module) or 'null'}: {place} ({lines}) does not call {type(core).__name__} as a "
            f"module. Name the submodule that it calls: {children}."
        )
    bad = unknown([list(found[0].args), found[0].kwargs])
    require(
        bad is None,
        f"model.core: {place} passes a {type(bad).__module__}.{type(bad).__qualname__} to the core{where[0]}. Name a "
        "submodule that takes tensors and plain values.",
    )
    return found[0].map(torch.Tensor.detach)


def _arguments(step: Callable[..., Any], batch: Any, index: int) -> list[Any]:
    """Return the arguments that a step takes: batch, batch_idx and dataloader_idx."""
    names = list(inspect.signature(step).parameters)
    return [batch, index, 0][: max(len(names), 1)] if not any(n.startswith("*") for n in names) else [batch, index]


def _caller() -> str:
    """Return the place in the user's file that calls the core, as " (file:line)"."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f" ({frame.f_code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class _Idle:
    """An optimizer that makes no step."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


@contextmanager
def _quiet(module: LightningModule) -> Iterator[Callable[[str], Callable[..., Any]]]:
    """Let steps of `module` run outside of a loop; give a function of the split that returns the step."""
    idle: list[_Idle] = []

    def optimizers(*_: Any, **__: Any) -> Any:
        if not idle:
            made = module.trainer.optimizers or _configure_optimizers(cast(Any, module.configure_optimizers()))[0]
            idle.extend(map(_Idle, made))
        return idle[0] if len(idle) == 1 else idle

    def step_of(split: str) -> Callable[..., Any]:
        validates = split != "train" and is_overridden("validation_step", module)
        return module.validation_step if validates else module.training_step

    before, modes = dict(vars(module)), [(part, part.training) for part in module.modules()]
    devices = sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})
    replaced = dict.fromkeys(_SILENT, _nothing) | {"optimizers": optimizers}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(_other_random_states())
        stack.enter_context(torch.no_grad())
        stack.enter_context(uncompiled(module))
        without = module._trainer is None
        if without:
            module.trainer = stand_in()
        vars(module).update(replaced)
        module.eval()
        try:
            yield step_of
        finally:
            for name in replaced:
                vars(module).pop(name, None)
                if name in before:
                    vars(module)[name] = before[name]
            if without:
                module.trainer = None
            for part, training in modes:
                part.training = training


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for a method of a LightningModule."""


@contextmanager
def _other_random_states() -> Iterator[None]:
    """Restore the states of Python's and NumPy's random numbers."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class ExampleRecorder(Callback):
    """Write the arguments of the core's first call to `example.pt` in the run directory, for export, predict and serve.

    The call is that of a step of the run itself: nothing runs twice. A compiled core gets no hook, which would be
    compiled too; there the first batch is recorded.
    """

    def __init__(self) -> None:
        self._hook: RemovableHandle | None = None
        self._records = False

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._records:
            self._records = False
            with suppress(UserError):  # export records a call, or says why it can't
                self._write(record_calls(pl_module, [batch], split="train")[0], trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove()

    def _remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def _watch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        core = core_of(pl_module)
        if not trainer.is_global_zero or self._hook is not None or Path(trainer.default_root_dir, EXAMPLE).exists():
            return
        if core._compiled_call_impl is not None:
            self._records = True
            return

        def write(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if "forward" not in vars(core):  # DDP calls the whole module with a step in the place of its forward
                self._remove()
                if unknown([list(args), kwargs]) is None:
                    self._write(Call(args, kwargs), trainer)

        self._hook = core.register_forward_pre_hook(write, with_kwargs=True)

    @staticmethod
    def _write(call: Call, trainer: Trainer) -> None:
        path = Path(trainer.default_root_dir, EXAMPLE)
        part = path.with_name(f".{EXAMPLE}.{os.getpid()}")
        call.save(part)
        part.replace(path)
