"""A user's LightningModule as a task: the Trainer runs it as it is.

The module's own step turns a batch into the core's arguments. `record` runs it up to that call.
"""

import inspect
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.utils._pytree import tree_leaves

from lathe.compression.modes import uncompiled
from lathe.compression.structure import structure_of
from lathe.config.validation import validated
from lathe.data.transfer import stand_in
from lathe.errors import UserError, is_user_file, require, user_location
from lathe.measure.calls import Call, unknown
from lathe.tasks.base import Task, gather_logs, gather_objects, restore_logs
from lathe.tasks.checkpoint_types import name_of, print_left_out
from lathe.tasks.core import EXAMPLE, core_name, core_of, find_core, record_calls
from lathe.tasks.scheduler import KEY, NEVER, make_optimizers

GRADIENTS = "gradients"  # in a checkpoint of a module with manual optimization, by the names of their parameters
# methods of a module that do nothing while a call is recorded
SILENT = ("log", "log_dict", "manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients")


class LightningTask(Task):
    """Adapter for a LightningModule that does not use Lathe. The module is the `net`: checkpoints have its own names,
    and the Trainer calls its own steps, `self.log` and `configure_optimizers`. `optimizer` and `scheduler` are for a
    module without the latter. `core` names the submodule that is compressed, compiled and exported (None: the only
    child with parameters, else the module), and `example` a file with its arguments (None: as a step calls it).

    Its metrics and outputs are not declared, so only a metric that the user names is monitored.

    Raises:
        UserError: `net` is not a LightningModule, has no training_step, has lazy parameters, or has both or neither of
            `configure_optimizers` and `optimizer`.
    """

    metrics: tuple[str, ...] = ()
    minimised: tuple[str, ...] = ()
    monitor = ""
    brings_module = True
    predicts = "what its predict_step returns"

    @validated
    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        scheduler: Callable[..., LRScheduler] | Mapping[str, Any] | None = None,
        core: str | None = None,
        example: str | None = None,
    ) -> None:
        super().__init__(net, optimizer, scheduler)
        key = f"model.net: {name_of(net)}"
        other = any(kind.__module__.startswith("pytorch_lightning.") for kind in type(net).__mro__)
        require(not other, f"{key} derives from pytorch_lightning's LightningModule. Import lightning.pytorch.")
        if not isinstance(net, LightningModule):
            raise UserError(f"{key} is not a LightningModule. Choose another task, such as task=classification.")
        require(not isinstance(net, Task), f"{key} is a task. Use task={{_target_: {name_of(net)}}}.")
        require(is_overridden("training_step", net), f"{key} has no training_step.")
        if is_overridden("configure_model", net):
            net.configure_model()  # Lightning calls it again, which does nothing by its contract
        lazy = next((name for name, value in net.named_parameters() if is_lazy(value)), None)
        require(lazy is None, f"{key}: {lazy} has no shape before the first batch: pass its size.")
        print_left_out(net, "model.net")
        self.chosen, self.example = find_core(net, core), example
        self.named_core = core is not None
        vars(net)["lathe_task"] = self  # not as a submodule

    @property
    def core(self) -> nn.Module:
        return self.net.get_submodule(self.chosen)

    @property
    def core_name(self) -> str:
        """Return the name of `core` in the user's module; "" for the module itself."""
        return self.chosen

    def print_core(self) -> None:
        """Name a core that was found, for a run that uses it."""
        if not self.named_core:
            which = f"{self.chosen}, its only child with parameters" if self.chosen else "the module itself"
            rank_zero_only(print)(f"model.core: {which} ({type(self.core).__name__}).", flush=True)

    @property
    def driven(self) -> LightningModule:
        """Return the user's module."""
        module = self.net
        assert isinstance(module, LightningModule)
        return module

    def check_training(self) -> None:
        own, has_optimizer = is_overridden("configure_optimizers", self.driven), self._make_optimizer is not None
        name = name_of(self.driven)
        require(
            not (own and has_optimizer),
            f"optimizer has no effect: {name} has configure_optimizers. Use optimizer=none scheduler=none.",
        )
        require(
            own or has_optimizer,
            f"optimizer=none: {name} has no configure_optimizers. Write one, or choose an optimizer such as adamw.",
        )
        if own and self.fused_optimizer:
            rank_zero_only(print)(f"{KEY}: no effect on the optimizer that {name} makes.")
        if has_optimizer:
            self.driven.configure_optimizers = self._configure  # type: ignore[method-assign]

    def check_run(self, cfg: Mapping[str, Any]) -> None:
        require(
            not cfg["test"] or is_overridden("test_step", self.driven),
            f"test=true: {name_of(self.driven)} has no test_step. Write one, or add test=false.",
        )

    def _configure(self) -> Any:
        self.trainer = self.driven.trainer
        return make_optimizers(self, self._make_optimizer, self._make_scheduler)

    def count_units(self, batch: Any) -> int:
        """Return the samples in the batch as Lightning counts them; 1 for a batch without a size."""
        try:
            return int(extract_batch_size(batch))
        except MisconfigurationException:
            return 1

    def own_callbacks(self) -> list[Callback]:
        names = [name for name, _ in self.driven.named_parameters()]
        callbacks: list[Callback] = [LogCheckpoint(names), ExampleRecorder()]
        return callbacks if self.driven.automatic_optimization else [*callbacks, GradientCheckpoint()]


class LogCheckpoint(Callback):
    """Save what a user's LightningModule has logged and not yet reported, as a task's own hooks do, and its attributes
    that are optimizers or schedulers and that `configure_optimizers` does not return.

    `parameters` are the names of the module's parameters without a Trainer, as in a loaded module.
    """

    def __init__(self, parameters: Sequence[str]) -> None:
        self.parameters = set(parameters)
        self._restored: list[dict[str, Any]] = []
        self._attributes: dict[str, dict[str, Any]] = {}
        self._tried = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        monitors = (getattr(callback, "monitor", None) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        synchronise = getattr(trainer._logger_connector, "synchronise", None)  # lathe.Trainer's
        if synchronise is not None:
            synchronise([name for name in monitors if isinstance(name, str)])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        names = (name for name, _ in pl_module.named_parameters() if "_quantizer." not in name)  # those of lsq
        later = next((name for name in names if name not in self.parameters), None)
        require(
            later is None,
            f"model.net: {name_of(pl_module)} creates {later} in setup(), which is not called to load a run. Create it "
            "in __init__ or configure_model.",
        )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        synchronise_module(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        synchronise_module(trainer, pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        attributes = {name: value.state_dict() for name, value in _own_attributes(trainer, pl_module).items()}
        checkpoint["task"] = {"log": gather_logs(trainer, pl_module), "attributes": attributes}
        structure = structure_of(core_of(pl_module))
        if structure:
            checkpoint["structure"] = structure
        for logger in trainer.loggers:
            logger.save()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get("task", {})
        self._restored, self._attributes = state.get("log", []), state.get("attributes", {})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, value in _own_attributes(trainer, pl_module).items():
            if name in self._attributes:
                value.load_state_dict(self._attributes[name])
        self._attributes = {}
        check_lengths(trainer)
        synchronise_module(trainer, pl_module)
        restored, self._restored = self._restored, []
        restore_logs(restored, trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make a checkpoint once without writing it, so that a value that can't be written costs no epoch."""
        if not self._tried and is_overridden("on_save_checkpoint", pl_module):
            trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        self._tried = True


def _own_attributes(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Return the module's attributes that are optimizers or schedulers and unknown to the Trainer."""
    known = {id(each) for each in (*trainer.optimizers, *(config.scheduler for config in trainer.lr_scheduler_configs))}
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (Optimizer, LRScheduler)) and id(value) not in known
    }


class GradientCheckpoint(Callback):
    """Save the gradients that no optimizer step has used yet, so that a module that steps with every fourth batch
    resumes between two steps.

    Lightning drops them before a validation. With several processes they are rank 0's, which are equal under DDP.
    """

    def __init__(self) -> None:
        self._unused: set[Tensor] = set()  # parameters whose gradients no step has used
        self._hooks: list[Any] = []
        self._restored: dict[str, Tensor] = {}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get(GRADIENTS, {})
        shapes = {name: value.shape for name, value in pl_module.named_parameters()}
        for name, value in saved.items():
            if shapes.get(name) != value.shape:
                raise ValueError(f"no parameter fits the saved gradient of {name}, {list(value.shape)}")
        self._restored = saved

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        restored, self._restored = self._restored, {}
        self._unused = set()
        for name, parameter in pl_module.named_parameters():
            if name in restored:
                parameter.grad = restored[name].to(parameter)
                self._unused.add(parameter)
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._unused.add))
        self._hooks += [
            optimizer.register_step_post_hook(self._stepped)
            for optimizer in trainer.optimizers
            if isinstance(optimizer, Optimizer)
        ]

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            self._unused.difference_update(group["params"])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        gradients = {
            name: value.grad.detach().clone()
            for name, value in pl_module.named_parameters()
            if value in self._unused and value.grad is not None and value.grad.any()
        }
        if gradients:
            checkpoint[GRADIENTS] = gradients

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def check_lengths(trainer: Trainer) -> None:
    """Raise UserError if the run is longer than torch's OneCycleLR, which raises after its last step."""
    if not trainer.lightning_module.automatic_optimization:
        return
    for config in trainer.lr_scheduler_configs:
        if not isinstance(config.scheduler, OneCycleLR):
            continue
        left = config.scheduler.total_steps - config.scheduler.last_epoch
        if config.interval == "epoch":
            end, done = trainer.max_epochs, trainer.current_epoch
        else:
            end, done = int(min(trainer.estimated_stepping_batches, NEVER)), trainer.global_step
        if end is None or not 0 <= end < NEVER or (end - done) // config.frequency <= left:
            continue
        unit = "epochs" if config.interval == "epoch" else "steps"
        raise UserError(
            f"OneCycleLR ends after {left} more {unit}, and this run takes {end - done}. Use "
            "total_steps=self.trainer.estimated_stepping_batches, or a shorter run."
        )


def synchronise_module(trainer: Trainer, module: LightningModule) -> None:
    """Make ranks of a user's LightningModule agree: schedulers that wait for a metric step by rank 0's, since without
    `sync_dist` each rank has its own; and `all_gather` refuses tensors of unequal shapes in evaluation, where ranks'
    last batches may differ by one sample, instead of aborting in torch.
    """
    if trainer.world_size == 1 or "all_gather" in vars(module):
        return
    gather, step = module.all_gather, module.lr_scheduler_step

    def checked_gather(data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        if group is None and not module.training:
            own = [list(leaf.shape) for leaf in tree_leaves(data) if isinstance(leaf, Tensor)]
            shapes = gather_objects(own, trainer)
            if any(other != shapes[0] for other in shapes):
                shown = "; ".join(f"rank {rank}: {shape}" for rank, shape in enumerate(shapes[:4]))
                raise UserError(
                    f"{type(module).__name__}.all_gather: tensors differ in shape between ranks ({shown}), as each "
                    "sample is evaluated once. Reduce first, or use torchmetrics or self.log(..., sync_dist=True)."
                )
        return gather(data, group, sync_grads)

    def synchronised_step(scheduler: Any, metric: Any) -> None:
        step(scheduler, None if metric is None else trainer.strategy.broadcast(float(metric)))

    module.all_gather = checked_gather  # type: ignore[method-assign]
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        module.lr_scheduler_step = synchronised_step  # type: ignore[method-assign]


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
