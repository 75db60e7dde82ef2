"""Base class of tasks: the step, what it reports, the optimizer, and plain names in checkpoints."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import lathe
from lathe.compression.structure import structure_of
from lathe.errors import require
from lathe.optim.build import factory_of, with_kernels
from lathe.tasks.metric_state import gather_logs, restore_logs
from lathe.tasks.metric_sums import MetricSums
from lathe.tasks.scheduler import make_optimizers

SPLITS = ("train", "val", "test")
# Hooks are functions and closures, which carry no attribute: only their package shows whose they are.
LIBRARIES = (f"{__name__.partition('.')[0]}.", "torch.", "lightning.")


class Task(MetricSums):
    """A net, an objective and the metrics that are reported for it.

    A subclass declares what it reports:

    - `metrics`, whose sums over a batch `reduce` returns; `computed`, metrics that `compute` derives from their means;
      `logged`, full names such as "val/f1" of what its own `self.log` reports;
    - `minimised`: metrics of which lower is better; `undirected`: those without a better direction;
    - `monitor`: the metric that chooses the best epoch ("" for none); `unit`: what throughput counts.

    `standard_step = True` in the body of a class states that its step reads inputs and targets of the batch, logs only
    the declared metrics and looks at no loop: several steps may run per call (`trainer.steps_per_call`). A subclass
    states it again, as it may do more.

    `optimizer` makes an Optimizer from the net, or is an optimizer class. `scheduler` makes a scheduler from the
    optimizer, which steps after every optimizer step and gets the run's number of steps if it has a parameter
    `total_steps`; or it is Lightning's mapping with `interval`, `frequency` and `monitor`. Both are None for
    evaluation. No argument is a hyper-parameter: the run directory rebuilds the task from its configuration.
    """

    metrics: tuple[str, ...] = ("loss",)
    computed: tuple[str, ...] = ()
    logged: tuple[str, ...] = ()
    minimised: tuple[str, ...] = ("loss", "perplexity")
    undirected: tuple[str, ...] = ()
    monitor = "val/loss"
    unit = "samples"
    standard_step = False
    brings_module = False  # True for a LightningModule that runs as it is
    predicts = "classes"  # what scripts/predict.py takes outputs for

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        scheduler: Callable[..., LRScheduler] | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self._make_optimizer, self._make_scheduler = optimizer, scheduler
        self.objective: Callable[[Any, Any], dict[str, Tensor]] = self.losses
        self.observers: list[Callable[[str, Any, Any], None]] = []  # called with split, outputs and batch of each step
        self.fused_optimizer: bool | str = False  # auto: as one kernel where there is one
        self.schedule_repeats = 1  # how often a run goes through its schedule
        self._restored: dict[str, Any] = {}  # "sums" and "log" of a checkpoint

    # The contract of a subclass: the loss, and the sums of its metrics.

    def losses(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        """Return named loss terms, whose sum is trained on. Callbacks wrap this by replacing `objective`."""
        raise NotImplementedError

    def reduce(self, outputs: Any, batch: Any, loss: Tensor) -> Tensor:
        """Return detached sums over the batch of each of `metrics`, and the number of counted samples, over which
        `loss` is the mean: [len(metrics) + 1].
        """
        raise NotImplementedError

    def compute(self, means: dict[str, float]) -> dict[str, float]:
        """Return the metrics named in `computed`, from the means of `metrics`."""
        return {}

    def scored(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """Return predictions and targets of the batch's counted rows, for `meters`."""
        raise NotImplementedError

    def reduce_later(self, outputs: Any, batch: Any) -> Any:
        """Return what `reduce_several` needs of a training batch, such as its targets; None to sum it now.

        The sums of a small batch cost as much as a small net's step.
        """
        return None

    def reduce_several(self, deferred: list[tuple[Any, Any, Tensor]]) -> Any:
        """Return the sums of several batches [batches, len(metrics) + 1]: of outputs, return value of `reduce_later`
        and loss of each, of equal shapes on the CPU.
        """
        raise NotImplementedError

    def count_units(self, batch: Any) -> int:
        """Return the number of `unit` in this process's batch."""
        return len(batch[0])

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """Raise UserError if the net does not fit the facts of the data; called on the CPU before data is touched."""

    def take_logits(self, facts: Mapping[str, Any], train: bool) -> None:
        """Reduce the net's outputs to logits, in a task that takes only these."""

    def check_training(self) -> None:
        """Raise UserError if the task can't be trained with its arguments."""

    def check_run(self, cfg: Mapping[str, Any]) -> None:
        """Raise UserError if the task can't do what a configuration asks for; called before data is touched."""

    def print_core(self) -> None:
        """Print which submodule is the core, if that was not given."""

    def own_callbacks(self) -> list[Callback]:
        """Return callbacks that the task needs."""
        return []

    # Steps.

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        return self.training_loss(self.net(batch[0]), batch)

    training_step.is_in_whole_step = True  # type: ignore[attr-defined]  # compile.scope=step does the same

    def training_loss(self, outputs: Any, batch: Any) -> Tensor:
        """Return the loss to train on, after adding the batch's metrics."""
        terms = self.objective(outputs, batch)
        if not self._has_training_sums:
            self._check_losses(terms)
        values = list(terms.values())
        loss = values[0] if len(values) == 1 else torch.stack(values).sum()
        self.add_training(outputs, batch, loss.detach())
        for observe in self.observers:
            observe("train", outputs, batch)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate_outputs("val", self.net(batch[0]), batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate_outputs("test", self.net(batch[0]), batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def evaluate_outputs(self, split: str, outputs: Any, batch: Any) -> None:
        """Add the metrics of a batch of validation or test."""
        terms = self.losses(outputs, batch)
        if split not in self._sums:
            self._check_losses(terms)
        loss = torch.stack(list(terms.values())).sum()
        self._add(split, self.reduce(outputs, batch, loss))
        if self.meters is not None:
            self.meters.update(split, *self.scored(outputs, batch))
        for observe in self.observers:
            observe(split, outputs, batch)

    def split_batch(self, batch: Any, n: int) -> list[Any]:
        """Return a batch as `n` micro-batches along the first dimension; scalars, such as a count of targets, are
        divided by `n`.
        """
        size = len(batch[0])
        require(size % n == 0, f"strategy.microbatches={n} does not divide a replica's batch of {size} samples.")
        parts = [[item / n] * n if item.dim() == 0 else list(item.chunk(n)) for item in batch]
        return [tuple(part) for part in zip(*parts, strict=True)]

    # Model and optimizer for the Trainer.

    def configure_model(self) -> None:
        """Let the strategy shard the net, before the optimizer is built."""
        shard = getattr(self.trainer.strategy, "shard", None)
        if shard is not None:
            shard(self)

    def configure_optimizers(self) -> Any:
        return make_optimizers(self, self._make_optimizer, self._make_scheduler)

    # Checkpoints.

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Use the net's own names in `state_dict`, and keep the metrics in progress.

        The current step is logged and on disk before the checkpoint is: callbacks save before this module's hook, and a
        resumed run does not log the step again.
        """
        self._log_step()
        log = gather_logs(self.trainer, self)
        for logger in self.trainer.loggers:
            logger.save()
        checkpoint["state_dict"] = {
            name.removeprefix("net."): value for name, value in checkpoint["state_dict"].items()
        }
        structure = structure_of(self.core)
        if structure:
            checkpoint["structure"] = structure
        checkpoint["task"] = {"sums": self.gather_sums(), "logged_step": self._logged_step, "log": log}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"net.{name}": value for name, value in checkpoint["state_dict"].items()}
        self._restored = checkpoint.get("task") or {}
        self._logged_step = self._restored.get("logged_step", self._logged_step)

    def on_train_start(self) -> None:
        restored, self._restored = self._restored, {}
        self.restore_sums(restored.get("sums", {}))
        restore_logs(restored.get("log", []), self.trainer, self)

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
        task: Any
        if "net" in kwargs:
            task = cls(**kwargs)
            lathe.restore(task.net, path, strict=strict is not False, key="checkpoint_path")
        else:
            names = ", ".join([*kwargs, *(["strict"] if strict is False else [])])
            require(not names, f"{names} requires net=, the net to load into. Without it, config.yaml decides.")
            require(path.exists(), f"checkpoint_path={path}: no such file.")
            run_dir = path.resolve().parent.parent
            require(
                (run_dir / "config.yaml").is_file(),
                f"checkpoint_path={path} is not in a run directory with config.yaml: pass net=, the net to load into.",
            )
            task = lathe.load(run_dir, path.resolve().stem, key="checkpoint_path").task
            require(
                isinstance(task, cls),
                f"checkpoint_path={path} is of a {type(task).__name__}, not a {cls.__name__}: load it with its class.",
            )
        return task if map_location is None else task.to(map_location)

    # For callbacks, strategies and the Trainer.

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

    @property
    def metric_names(self) -> list[str]:
        """Return every metric that this task reports, which a callback may monitor."""
        return [*(f"{split}/{metric}" for split in SPLITS for metric in self.reported), *self.logged]

    @property
    def reported(self) -> tuple[str, ...]:
        """Return the metrics of each split."""
        return (*self.metrics, *self.computed, *(() if self.meters is None else self.meters.names))

    @property
    def logs_more(self) -> bool:
        """Return whether `self.log` may report names that the task does not declare."""
        return not self.standard_step

    def has_default_step(self) -> bool:
        """Return whether `training_step` and `training_loss` are Task's own."""
        kind = type(self)
        return kind.training_step is Task.training_step and kind.training_loss is Task.training_loss

    def optimizer_over(self, net: nn.Module, kernels: Mapping[str, Any] | None) -> Optimizer:
        """Return an optimizer like the run's over another net, with these `fused` and `foreach`; None: the fastest."""
        factory = factory_of(self._make_optimizer)
        factory = with_kernels(factory, net.parameters(), False)[0] if kernels is None else partial(factory, **kernels)
        return factory(net)

    def own_hook(self) -> str | None:
        """Describe a user's hook on one of the modules or parameters; None if there is none."""
        places = [("every module", vars(torch.nn.modules.module), "_global")]
        places += [(name or "the module", vars(part), "") for name, part in self.driven.named_modules()]
        kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
        hooks_by_name = [
            (name, hook) for name, own, prefix in places for kind in kinds for hook in own[prefix + kind].values()
        ]
        for name, parameter in self.driven.named_parameters():
            for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
                hooks_by_name += [(name, hook) for hook in (hooks or {}).values()]
        for name, hook in hooks_by_name:
            function = getattr(hook, "func", hook)  # of a functools.partial
            home = getattr(function, "__module__", None) or type(function).__module__
            if not home.startswith(LIBRARIES):
                return f"{getattr(function, '__qualname__', type(function).__qualname__)}, a hook on {name},"
        return None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.standard_step = vars(cls).get("standard_step", False)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets the running hook's name some forty times a step; a Module looks each up among parameters and
        # buffers first.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def _check_losses(self, terms: Any) -> None:
        values = list(terms.values()) if isinstance(terms, Mapping) else []
        require(
            bool(values) and all(isinstance(value, Tensor) and value.numel() == 1 for value in values),
            f"{type(self).__module__}.{type(self).__qualname__}.losses: return a dict of scalar tensors by name.",
        )
