"""A user's LightningModule as a task: the Trainer runs it as it is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.utils._pytree import tree_leaves

from lathe.compression.structure import structure_of
from lathe.config.validation import validated
from lathe.errors import UserError, require
from lathe.measure.processes import everyones
from lathe.tasks.base import Task
from lathe.tasks.checkpoint_types import name_of, print_left_out
from lathe.tasks.core import core_of, find_core
from lathe.tasks.metric_state import gather_logs, restore_logs
from lathe.tasks.recording import ExampleRecorder
from lathe.tasks.scheduler import KEY, NEVER, make_optimizers

GRADIENTS = "gradients"  # in a checkpoint of a module with manual optimization, by the names of their parameters


class LightningTask(Task):
    """Adapter for a LightningModule that does not use Lathe. The module is the `net`: checkpoints have its own names,
    and the Trainer calls its own steps, `self.log` and `configure_optimizers`. `optimizer` and `scheduler` are for a
    module without the latter. `core` names the submodule that is compressed, compiled and exported (None: the only
    child with parameters, else the module), and `example` a file with its arguments (None: as a step calls it).

    Its metrics and outputs are not declared, so only a metric that the user names is monitored.
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
            shapes = everyones(own)
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
