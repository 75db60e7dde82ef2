"""Recording how a user's LightningModule calls its core: the core's arguments in a step of the module.

`record` runs a step up to that call, outside of a Trainer. `ExampleRecorder` takes a call of the run itself.
"""

import inspect
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lathe.compression.modes import uncompiled
from lathe.data.transfer import stand_in
from lathe.errors import UserError, is_user_file, require, user_location
from lathe.measure.calls import Call, unknown
from lathe.tasks.checkpoint_types import name_of
from lathe.tasks.core import EXAMPLE, core_name, core_of, record_calls

# methods of a module that do nothing while a call is recorded
SILENT = ("log", "log_dict", "manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients")


class _Recorded(BaseException):
    """Ends a user's step at the call of the core; no `except Exception` of the step catches it."""


def record(module: LightningModule, batches: Iterable[Any], split: str) -> list[Call]:
    """Return the core's arguments in the module's step on each batch, as `lathe.tasks.core.record_calls` does."""
    validates = split != "train" and is_overridden("validation_step", module)
    step = module.validation_step if validates else module.training_step
    with _outside_of_a_loop(module):
        return [_record(module, step, batch, index) for index, batch in enumerate(batches)]


def _record(module: LightningModule, step: Callable[..., Any], batch: Any, index: int) -> Call:
    core, calls, where = core_of(module), list[Call](), ""

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal where
        calls.append(Call(args, kwargs))
        frame: Any = sys._getframe(1)
        while frame is not None and not is_user_file(frame.f_code.co_filename):
            frame = frame.f_back
        where = f" ({frame.f_code.co_filename}:{frame.f_lineno})" if frame is not None else ""
        raise _Recorded

    handle = core.register_forward_pre_hook(keep, prepend=True, with_kwargs=True)
    step_name = f"{type(module).__name__}.{step.__name__}"
    names = list(inspect.signature(step).parameters)
    takes = 2 if any(name.startswith("*") for name in names) else max(len(names), 1)
    try:
        step(*[batch, index, 0][:takes])  # batch, batch_idx and dataloader_idx
    except _Recorded:
        pass
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            f"model.core: {step_name} raises {type(error).__name__} before it calls the core{user_location(error)}: "
            f"{reason}. Name a submodule that it calls earlier, or give model.example."
        ) from error
    finally:
        handle.remove()
    if not calls:
        lines = f"{inspect.getsourcefile(step)}:{inspect.getsourcelines(step)[1]}"
        children = ", ".join(name for name, part in module.named_children() if any(True for _ in part.parameters()))
        raise UserError(
            f"model.core={core_name(module) or 'null'}: {step_name} ({lines}) does not call {type(core).__name__} as a "
            f"module. Name the submodule that it calls: {children}."
        )
    bad = unknown([list(calls[0].args), calls[0].kwargs])
    require(
        bad is None,
        f"model.core: {step_name} passes a {name_of(bad)} to the core{where}. Name a submodule that takes tensors and "
        "plain values.",
    )
    return calls[0].map(torch.Tensor.detach)


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
def _outside_of_a_loop(module: LightningModule) -> Iterator[None]:
    """Let steps of `module` run in eval mode, without gradients, logs and updates; restore modes and random states."""
    idle: list[_Idle] = []

    def optimizers(*_: Any, **__: Any) -> Any:
        if not idle:
            own_optimizers = (
                module.trainer.optimizers or _configure_optimizers(cast(Any, module.configure_optimizers()))[0]
            )
            idle.extend(map(_Idle, own_optimizers))
        return idle[0] if len(idle) == 1 else idle

    attributes, modes = dict(vars(module)), [(part, part.training) for part in module.modules()]
    devices = sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})
    replaced: dict[str, Any] = dict.fromkeys(SILENT, lambda *_, **__: None) | {"optimizers": optimizers}
    python, numpy, detached = random.getstate(), np.random.get_state(), module._trainer is None
    with torch.random.fork_rng(devices=devices), torch.no_grad(), uncompiled(module):
        if detached:
            module.trainer = stand_in()
        vars(module).update(replaced)
        module.eval()
        try:
            yield
        finally:
            for name in replaced:
                vars(module).pop(name, None)
                if name in attributes:
                    vars(module)[name] = attributes[name]
            if detached:
                module.trainer = None
            for part, training in modes:
                part.training = training
            random.setstate(python)
            np.random.set_state(numpy)


class ExampleRecorder(Callback):
    """Write the arguments of the core's first call to `example.pt` in the run directory, for export, predict and serve.

    The call is that of a step of the run itself: nothing runs twice. A compiled core gets no hook, which would be
    compiled too; there the first batch is recorded.
    """

    def __init__(self) -> None:
        self._hook: Any = None
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
