"""Base class of tasks: steps, running sums of metrics, optimizers, plain names in checkpoints."""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

import lathe
from lathe.compression.structure import structure_of
from lathe.data.steps import reached, steps_before
from lathe.errors import require
from lathe.optim.build import factory_of, with_kernels
from lathe.tasks.scheduler import make_optimizers

if TYPE_CHECKING:
    from lathe.tasks.loss_and_metrics import Meters

SPLITS = ("train", "val", "test")
MAX_DEFERRED = 64  # batches whose sums are computed together
MAX_NUMBERS = 2**18  # in their outputs
# Hooks are functions and closures, which carry no attribute: only their package shows whose they are.
LIBRARIES = (f"{__name__.partition('.')[0]}.", "torch.", "lightning.")


def stacked(loss: Tensor, others: Iterable[Tensor], count: Tensor | int) -> Tensor:
    """Return what `Task.reduce` returns, in float32 at least: the summed loss, other sums and the count."""
    dtype = torch.promote_types(loss.dtype, torch.float32)
    number = count if isinstance(count, Tensor) else torch.full_like(loss, count, dtype=dtype)
    return torch.stack([value.to(dtype) for value in (loss.detach().to(dtype) * number, *others, number)])


class Task(LightningModule):
    """A net, an objective and the metrics that are reported for it.

    A subclass declares what it reports:

    - `metrics`, whose sums over a batch `reduce` returns; `computed`, metrics that `compute` derives from their means;
      `logged`, full names such as "val/f1" of what its own `self.log` reports;
    - `minimised`: metrics of which lower is better; `undirected`: those without a better direction;
    - `monitor`: the metric that chooses the best epoch ("" for none); `unit`: what throughput counts.

    `standard_step = True` in the body of a class states that its step reads inputs and targets of the batch, logs only
    the declared metrics and looks at no loop: several steps may run per call (`trainer.steps_per_call`). A subclass
    states it again, as it may do more.

    Sums stay on the device and are read once per logged step or epoch: a read waits for the device, and metric objects
    per step cost several times the step of a small net. The sums of all ranks are added before they are divided, so
    metrics do not depend on the number of devices. `meters` are torchmetrics, updated with `scored` of every batch.

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

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.standard_step = vars(cls).get("standard_step", False)

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
        self.meters: Meters | None = None
        self.observers: list[Callable[[str, Any, Any], None]] = []  # called with split, outputs and batch of each step
        self.fused_optimizer: bool | str = False  # auto: as one kernel where there is one
        self.schedule_repeats = 1  # how often a run goes through its schedule
        # Training has two sums: those since the last logged step, and those of the epoch before that.
        self._sums: dict[str, Tensor] = {}
        self._epoch_sums: dict[str, Tensor] = {}
        self._deferred: list[tuple[Any, Any, Tensor]] = []  # outputs, targets and loss of steps not yet in the sums
        self._window_ends: list[int] = []  # places in `_deferred` where a logged window ends
        self._windows: list[Tensor] = []  # sums of ended windows
        self._started = False  # a batch of training was summed directly, which checks `reduce`
        self.step_counts: list[Tensor] | None = None  # counted samples, where batches are weighted by them
        self._logged_step = -1
        self.latest: dict[str, float] = {}
        self._deferred_rows: list[tuple[dict[str, Any], int]] = []  # of logged steps, with their epochs
        self._restored: dict[str, Any] = {}  # "sums" and "log" of a checkpoint

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets the running hook's name some forty times a step; a Module looks each up among parameters and
        # buffers first.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

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

    # What a subclass writes.

    def losses(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        """Return named loss terms, whose sum is trained on. Callbacks wrap this by replacing `objective`."""
        raise NotImplementedError

    def reduce(self, outputs: Any, batch: Any, loss: Tensor) -> Tensor:
        """Return detached sums over the batch of each of `metrics`, and the number of counted samples, over which
        `loss` is the mean: [len(metrics) + 1].
        """
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

    def scored(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """Return predictions and targets of the batch's counted rows, for `meters`."""
        raise NotImplementedError

    def compute(self, means: dict[str, float]) -> dict[str, float]:
        """Return the metrics named in `computed`, from the means of `metrics`."""
        return {}

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

    def has_default_step(self) -> bool:
        """Return whether `training_step` and `training_loss` are Task's own."""
        kind = type(self)
        return kind.training_step is Task.training_step and kind.training_loss is Task.training_loss

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

    def _check_losses(self, terms: Any) -> None:
        values = list(terms.values()) if isinstance(terms, Mapping) else []
        require(
            bool(values) and all(isinstance(value, Tensor) and value.numel() == 1 for value in values),
            f"{type(self).__module__}.{type(self).__qualname__}.losses: return a dict of scalar tensors by name.",
        )

    def split_batch(self, batch: Any, n: int) -> list[Any]:
        """Return a batch as `n` micro-batches along the first dimension; scalars, such as a count of targets, are
        divided by `n`.

        Raises:
            UserError: the samples do not divide by `n`.
        """
        size = len(batch[0])
        require(size % n == 0, f"strategy.microbatches={n} does not divide a replica's batch of {size} samples.")
        parts = [[item / n] * n if item.dim() == 0 else list(item.chunk(n)) for item in batch]
        return [tuple(part) for part in zip(*parts, strict=True)]

    # Sums of metrics.

    def add_training(self, outputs: Any, batch: Any, loss: Tensor) -> None:
        """Add the metrics of a training batch; `loss` is detached."""
        counts = self.step_counts
        targets = self.reduce_later(outputs, batch) if self._started and counts is None else None
        if targets is not None:
            outputs = outputs.detach()
            if self._deferred:
                limit = min(MAX_DEFERRED, MAX_NUMBERS // max(1, outputs.numel()))
                if len(self._deferred) >= limit or self._deferred[0][0].shape != outputs.shape:
                    self._sum_deferred()
            self._deferred.append((outputs, targets, loss))
        else:
            self._sum_deferred()
            sums = self.reduce(outputs, batch, loss)
            self._add("train", sums)
            self._started = True
            if counts is not None:
                counts.append(sums[-1])
        if self.meters is not None:
            self.meters.update("train", *self.scored(outputs.detach(), batch))

    @property
    def _has_training_sums(self) -> bool:
        """Return whether there were batches of training since the last logged step."""
        return bool(self._deferred) or "train" in self._sums

    def _sum_deferred(self) -> None:
        """Add the deferred batches one after the other, which gives the same digits as without deferring."""
        if not self._deferred:
            return
        rows, ends = self.reduce_several(self._deferred), self._window_ends
        self._deferred, self._window_ends, begin = [], [], 0
        for end in ends:
            self._add_rows(rows[begin:end])
            self._windows.append(self._pop("train"))
            begin = end
        self._add_rows(rows[begin:])

    def _add_rows(self, rows: Any) -> None:
        if len(rows):
            total = self._sums.get("train")
            before = [] if total is None else [total.numpy()[None]]
            added = np.add.accumulate(np.concatenate((*before, rows)), axis=0, dtype=rows.dtype)
            self._sums["train"] = torch.from_numpy(added[-1].copy())

    def _add(self, split: str, sums: Tensor) -> None:
        total = self._sums.get(split)
        if total is None:
            require(
                isinstance(sums, Tensor) and sums.shape == (len(self.metrics) + 1,),
                f"{type(self).__name__}.reduce: return a tensor [len(metrics) + 1] = [{len(self.metrics) + 1}], the "
                f"sums of {', '.join(self.metrics)} over the batch and the number of samples.",
            )
        sums = sums.to(self._sums_dtype)
        self._sums[split] = sums if total is None else total + sums

    def add_zeros(self, split: str) -> None:
        """Add nothing, on a rank without outputs (each stage of a pipeline but the last), so that it has sums too."""
        self._add(split, self._zeros())

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.metrics) + 1, dtype=self._sums_dtype, device=self.device)

    @property
    def _sums_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)  # type: ignore[arg-type]

    def _pop(self, split: str) -> Tensor:
        """Return the sums since the last call; those of training are added to the epoch's."""
        sums = self._sums.pop(split)
        if split == "train":
            epoch = self._epoch_sums.get(split)
            self._epoch_sums[split] = sums if epoch is None else epoch + sums
        return sums

    def _means(self, split: str, sums: Tensor) -> dict[str, float]:
        if self.trainer.world_size > 1:
            sums = self.trainer.strategy.reduce(sums.clone(), reduce_op="sum")
        *values, count = sums.tolist()
        if not count:
            return {}
        means = {name: value / count for name, value in zip(self.metrics, values, strict=True)}
        return {f"{split}/{name}": value for name, value in {**means, **self.compute(means)}.items()}

    # Reports: of logged steps, of groups of steps (`lathe.trainer.multi_step`), and of epochs.

    def configure_callbacks(self) -> list[Any]:
        """Return none, and keep Lightning from advising `sync_dist` for metrics whose sums are of all ranks already."""
        names = "|".join(map(re.escape, self.metric_names))
        warnings.filterwarnings("ignore", message=rf".*recommended to use `self\.log\('({names})', .*sync_dist=True")
        return []

    def skippable_steps(self, trainer: Any) -> float:
        """Count the steps before the next logged one, which need no hook (`lathe.callbacks.SkippableHooks`)."""
        return steps_before(trainer, trainer.log_every_n_steps)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._log_step()

    def _log_step(self) -> None:
        """Log the mean since the last logged step, every `trainer.log_every_n_steps` optimizer steps."""
        trainer: Any = self.trainer
        step, interval = trainer.global_step, trainer.log_every_n_steps
        if step > 0 and reached(trainer, interval) and step != self._logged_step and self._has_training_sums:
            self._logged_step = step
            self._sum_deferred()
            self.latest = self._means("train", self._pop("train"))
            self.write(self.latest)

    def write(self, metrics: dict[str, float]) -> None:
        """Send metrics to all loggers at the current optimizer step."""
        trainer = self.trainer
        row, step = {**metrics, "epoch": trainer.current_epoch}, trainer.global_step
        for logger in trainer.loggers:
            logger.log_metrics(dict(row), step=step)

    def can_defer_log(self, trainer: Any) -> bool:
        """Return whether the row of a logged step may be written after steps that follow it."""
        return type(self).write is Task.write and "write" not in vars(self)

    def deferred_row(self, trainer: Any) -> dict[str, Any]:
        """Return the row of a logged step, which `complete_deferred_rows` fills in."""
        self._logged_step = trainer.global_step
        if self._deferred:
            self._window_ends.append(len(self._deferred))
        else:
            self._windows.append(self._pop("train"))
        row: dict[str, Any] = {}
        self._deferred_rows.append((row, trainer.current_epoch))
        return row

    def complete_deferred_rows(self, trainer: Any) -> None:
        """Fill in the rows of logged steps, after a group of steps."""
        self._sum_deferred()
        for (row, epoch), sums in zip(self._deferred_rows, self._windows, strict=True):
            self.latest = self._means("train", sums)
            row.update(self.latest, epoch=epoch)
        self._deferred_rows, self._windows = [], []

    def on_train_epoch_end(self) -> None:
        if self._has_training_sums:
            self._sum_deferred()
            self._pop("train")
        if "train" in self._epoch_sums:
            means = self._means("train", self._epoch_sums.pop("train")) | self._take_meters("train")
            self.write({f"{name}_epoch": value for name, value in means.items()})
            self._log_exact(means, logger=False)

    def on_validation_epoch_end(self) -> None:
        self._report_split("val")

    def on_test_epoch_end(self) -> None:
        self._report_split("test")

    def _report_split(self, split: str) -> None:
        if split in self._sums:
            self._log_exact(self._means(split, self._sums.pop(split)) | self._take_meters(split))

    def _take_meters(self, split: str) -> dict[str, float]:
        values = {} if self.meters is None else self.meters.take(split, self.trainer)
        return {f"{split}/{name}": value for name, value in values.items()}

    def _log_exact(self, means: dict[str, float], logger: bool | None = None) -> None:
        """Log metrics for callbacks and the progress bar; with `logger=None` also for what `test` returns."""
        exact = {name: torch.tensor(value, dtype=torch.float64) for name, value in means.items()}
        self.log_dict(exact, logger=logger, prog_bar=not self.trainer.testing, rank_zero_only=False)

    # What the Trainer builds of the task.

    def configure_model(self) -> None:
        """Let the strategy shard the net, before the optimizer is built."""
        shard = getattr(self.trainer.strategy, "shard", None)
        if shard is not None:
            shard(self)

    def configure_optimizers(self) -> Any:
        return make_optimizers(self, self._make_optimizer, self._make_scheduler)

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
        checkpoint["task"] = {"sums": self._gather_sums(), "logged_step": self._logged_step, "log": log}

    def _gather_sums(self) -> dict[str, list[list[float]]]:
        """Return every rank's sums of training in progress, by when they are reset; a collective.

        Their total on one rank would add up in another order, and differ in the last digit.
        """
        self._sum_deferred()
        gathered = {}
        for kind, sums in (("window", self._sums.get("train")), ("epoch", self._epoch_sums.get("train"))):
            if self.trainer.world_size > 1:
                own = self._zeros() if sums is None else sums
                rows = [torch.empty_like(own) for _ in range(self.trainer.world_size)]
                torch.distributed.all_gather(rows, own)
                gathered[kind] = [row.tolist() for row in rows]
            elif sums is not None:
                gathered[kind] = [sums.tolist()]
        return gathered

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"net.{name}": value for name, value in checkpoint["state_dict"].items()}
        self._restored = checkpoint.get("task") or {}
        self._logged_step = self._restored.get("logged_step", self._logged_step)

    def on_train_start(self) -> None:
        """Restore this rank's sums; with another number of ranks, rank 0 resumes with the total."""
        restored, self._restored, trainer = self._restored, {}, self.trainer
        zeros = self._zeros()
        for kind, saved in restored.get("sums", {}).items():
            rows = torch.tensor(saved, dtype=zeros.dtype, device=zeros.device)
            if len(rows) != trainer.world_size:
                none = torch.zeros_like(rows[:1]).expand(trainer.world_size - 1, -1)
                rows = torch.cat((rows.sum(0, keepdim=True), none))
            sums = self._sums if kind == "window" else self._epoch_sums
            sums["train"] = rows[trainer.global_rank].clone()
        restore_logs(restored.get("log", []), trainer, self)

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


def gather_logs(trainer: Trainer, module: LightningModule) -> list[dict[str, Any]]:
    """Write what `self.log` has due, and return what it has not reported yet, of each rank; a collective."""
    connector: Any = trainer._logger_connector
    if trainer.state.fn != "fit" or not hasattr(connector, "flush"):  # Lightning's own Trainer
        return []
    connector.flush()
    return gather_objects(connector.state(module), trainer)


def restore_logs(saved: list[dict[str, Any]], trainer: Trainer, module: LightningModule) -> None:
    """Restore this rank's part of `gather_logs`; warn where another number of ranks loses states of torchmetrics."""
    connector: Any = trainer._logger_connector
    if not hasattr(connector, "restore"):
        return
    if len(saved) == trainer.world_size:
        connector.restore(module, saved[trainer.global_rank])
    elif any(state["count"] for part in saved for state in part["metrics"].values()):
        rank_zero_warn(
            f"Resumed on {trainer.world_size} processes instead of {len(saved)}: this epoch's training torchmetrics "
            "cover the rest of it only."
        )


def gather_objects(mine: Any, trainer: Trainer) -> list[Any]:
    """Return every rank's object; a collective."""
    each = [mine] * trainer.world_size
    if trainer.world_size > 1:
        torch.distributed.all_gather_object(each, mine)
    return each


def metric_state(metric: Metric) -> dict[str, Any]:
    """Return a torchmetric's state: plain values and tensors on the CPU."""
    values: dict[str, Any] = {}
    for name in metric._defaults:
        value = getattr(metric, name)
        parts = [part.detach().cpu().clone() for part in (value if isinstance(value, list) else [value])]
        values[name] = parts if isinstance(value, list) else parts[0]
    return {"count": metric._update_count, "values": values}


def load_metric_state(metric: Metric, state: dict[str, Any]) -> None:
    """Load what `metric_state` returned."""
    metric._update_count, metric._computed = state["count"], None
    for name, value in state["values"].items():
        moved = [part.to(metric.device) for part in value] if isinstance(value, list) else value.to(metric.device)
        setattr(metric, name, moved)
