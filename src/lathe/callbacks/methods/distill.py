"""Knowledge distillation: add a frozen teacher's term to the student's loss."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from pydantic import Field
from torch import Tensor, nn

from lathe.callbacks.methods.base import Compression
from lathe.callbacks.methods.distill_layers import KEY, Capture, probe
from lathe.callbacks.methods.distill_teachers import Teachers
from lathe.callbacks.methods.distill_terms import FEATURES, Comparison, Settings, counted, weights_of
from lathe.callbacks.methods.teachers import OpenRun
from lathe.compression.modes import copy_input
from lathe.config.types import (
    Count,
    DistillationMethod,
    JoinedDistillationMethods,
    Name,
    NonNegative,
    NonNegativeInt,
    Positive,
    Share,
    ShareBelowOne,
    SomeDistillationMethods,
)
from lathe.config.validation import validated
from lathe.data.transfer import val_batches
from lathe.errors import ArgumentError, UserError
from lathe.measure.processes import everyones_tensors


class Distill(Compression):
    """Train on `hard + soft`; with `alpha`, on `(1 - alpha) * hard + alpha * soft`.

    `hard` is the task's loss; `soft` is the sum of the methods' terms, a weighted mean over teachers. Both, as they
    enter the sum, are logged as train/hard_loss and train/soft_loss. A teacher gets the net's augmented and mixed
    inputs, in eval mode and in the precision of the run. Its validation metric is logged at the start, and the run ends
    with a warning if the student is as good. Rows whose target is -100 do not count. Relational methods (dist, rkd,
    crd) compare samples within a rank's batch. Connectors (fitnets, crd) are a group of the run's optimizer without
    weight decay.

    configs/compression/distill.yaml describes the arguments. `teacher` is a run directory, "ema", {"net": net,
    "weights": path}, or a list.
    """

    @validated
    def __init__(
        self,
        teacher: Any,
        method: DistillationMethod | SomeDistillationMethods | JoinedDistillationMethods = "kd",
        alpha: Share | None = None,
        weight: Positive | dict[str, Positive] | None = None,
        temperature: Positive = 4.0,
        warmup: Share = 0.0,
        teacher_weights: Annotated[list[Positive], Field(min_length=1)] | None = None,
        ema_decay: ShareBelowOne = 0.999,
        target_weight: NonNegative = 1.0,
        other_weight: NonNegative = 8.0,
        between_weight: NonNegative = 1.0,
        within_weight: NonNegative = 1.0,
        distance_weight: NonNegative = 25.0,
        angle_weight: NonNegative = 50.0,
        crd_features: Count = 128,
        crd_queue: NonNegativeInt = 4096,
        crd_temperature: Positive = 0.07,
        student_layers: Name | Annotated[list[Any], Field(min_length=1)] | None = None,
        teacher_layers: Name | Annotated[list[Any], Field(min_length=1)] | None = None,
        cache: NonNegative = 0,
    ) -> None:
        weights = weights_of(method, weight)
        self.settings = Settings(
            weights,
            temperature,
            target_weight,
            other_weight,
            between_weight,
            within_weight,
            distance_weight,
            angle_weight,
            crd_features,
            crd_queue,
            crd_temperature,
            student_layers,
            teacher_layers,
        )
        if cache and not set(weights).isdisjoint(FEATURES):
            raise ArgumentError(f"cache={cache} keeps logits alone, and {'+'.join(weights)} needs layers: set cache=0.")
        self.teachers = Teachers(teacher, teacher_weights, ema_decay, cache)
        self.alpha = 0.9 if alpha is None and list(weights) == ["kd"] else alpha
        self.warmup = warmup
        self.open_run: OpenRun | None = None  # opens the net of a run directory; set by the training
        self.comparisons: list[Comparison] = []
        self.best: float | None = None  # the student's best value of the task's monitor
        self._capture: Capture | None = None  # the student's layers
        self._undo: list[Callable[[], None]] = []
        self._sums: Tensor | None = None  # [3]: sums of hard, soft and 1 over the steps since the last logged one
        self._restored: list[list[float]] | None = None
        self._steps = (0, 0)  # the window's first optimizer step, and the first one after it
        self._step = -1
        self._filled = 0  # the first epoch at which the cache is judged

    def objective(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        """Return the two terms of the loss; outside the window, the task's own terms."""
        terms = self._inner(outputs, batch)
        (begin, end), step = self._steps, self._trainer.global_step
        if begin <= step < end:
            hard = torch.stack(list(terms.values())).sum() if len(terms) > 1 else next(iter(terms.values()))
            soft = self._soft(outputs, batch)
            if self.warmup:
                soft = soft * min(1.0, (step - begin + 1) / max(1.0, self.warmup * (end - begin)))
            if self.alpha is not None:
                hard, soft = (1 - self.alpha) * hard, self.alpha * soft
            terms = {"hard": hard, "soft": soft}
            now = torch.stack((hard.detach().float(), soft.detach().float(), torch.ones((), device=soft.device)))
            self._sums = now if self._sums is None else self._sums + now
        if self._capture is not None:
            self._capture.found.clear()
        return terms

    def _soft(self, outputs: Tensor, batch: Any) -> Tensor:
        logits = self.teachers.answers(batch[0])
        kind = outputs.device.type
        # 16 bits are too imprecise for relations, and this part is cheap
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            which = counted(outputs, batch)
            terms = [
                share * comparison(outputs, logits[:, index], self._capture, capture, which)
                for index, (share, comparison, capture) in enumerate(
                    zip(self.teachers.shares, self.comparisons, self.teachers.captures, strict=True)
                )
            ]
        self.teachers.forget()
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum()

    def check(self, net: nn.Module) -> None:
        self.teachers.open_others(self.open_run)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._trainer, task = trainer, pl_module
        net: nn.Module = task.get_submodule("net")
        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # a connector sets it
        example = next(iter(val_batches(data, next(net.parameters()).device)))[0][:2]
        self.teachers.open(net, self.open_run)
        self._undo.append(net.register_forward_pre_hook(copy_input).remove)  # the teachers read the batch afterwards
        student = probe(net, example)
        for index, teacher in enumerate(self.teachers.nets):
            found = self.teachers.probed(index, example, student)
            comparison = Comparison(self.settings, student, found, (net, teacher), torch.initial_seed() + index)
            names = [theirs for pairs in comparison.pairs.values() for _, theirs in pairs]
            self.teachers.captures.append(Capture(teacher, names, training_only=False) if names else None)
            self.comparisons.append(comparison)
        names = [ours for comparison in self.comparisons for pairs in comparison.pairs.values() for ours, _ in pairs]
        self._capture = Capture(net, names, training_only=True) if names else None
        trained = self._trained()
        if trained:
            self._join(trainer, task, trained)
        if not trained or trainer.world_size == 1:
            self.on_after_backward = None  # type: ignore[assignment]  # Lightning skips it
        inner: Any = task.objective
        self._inner: Callable[[Any, Any], dict[str, Tensor]] = inner
        task.objective = self.objective  # type: ignore[assignment]
        self._undo.append(lambda: setattr(task, "objective", inner))

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for comparison in self.comparisons for parameter in comparison.connectors.parameters()]

    def _join(self, trainer: Trainer, task: Any, trained: list[nn.Parameter]) -> None:
        """Add the connectors to the run's optimizer."""
        strategy = trainer.strategy
        whole = isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)
        if not whole or hasattr(strategy, "shard"):
            raise UserError(
                f"{KEY}.method={'+'.join(self.settings.weights)} trains connectors beside the net, which strategy "
                f"{type(strategy).__name__} does not take: use strategy=ddp, or method=kd, dkd, dist, attention or rkd."
            )
        make = task._make_optimizer

        def joined(net: nn.Module) -> Any:
            optimizer = make(net)
            group: dict[str, Any] = {"params": trained, "name": "distill", "weight_decay": 0.0}
            if any("role" in other for other in optimizer.param_groups):
                group["role"] = "adamw"  # connectors are not hidden layers, so Muon does not take them
            optimizer.add_param_group(group)
            return optimizer

        task._make_optimizer = joined
        self._undo.append(lambda: setattr(task, "_make_optimizer", make))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        dtype = next(p.dtype for p in pl_module.get_submodule("net").parameters() if p.is_floating_point())
        self.teachers.to(pl_module.device, dtype)
        for comparison in self.comparisons:
            comparison.to(pl_module.device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        average = self.teachers.average
        if average is not None:
            average.bind(pl_module.get_submodule("net"))
            if (
                0 <= self._step < trainer.global_step
            ):  # the checkpoint was written between an optimizer step and its update
                average.update()
        self._step = trainer.global_step
        # A cache starts empty: it is judged after two complete epochs, not counting one that a run resumes inside.
        self._filled = trainer.current_epoch + (3 if trainer.global_step else 2)
        self._steps = (self.step_at(trainer, 0), self.step_at(trainer, 1))
        rows, self._restored = self._restored, None
        if rows is not None and any(row[2] > 0 for row in rows):
            world = trainer.world_size  # the number of ranks has changed: each continues with a share of the total
            total = [sum(column) / world for column in zip(*rows, strict=True)]
            mine = rows[trainer.global_rank] if len(rows) == world else total
            self._sums = torch.tensor(mine, dtype=torch.float32, device=pl_module.device)
        if average is None and not self.teachers.metrics:
            self.teachers.evaluate(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.teachers.average is not None:
            self.teachers.average.bind(pl_module.get_submodule("net"))
        if trainer.current_epoch >= self._filled:
            self.teachers.check_cache()

    every_step = ("on_train_batch_end",)

    def skippable_steps(self, trainer: Trainer) -> float:
        """Return inf, or 0 if connectors average gradients at each step."""
        return math.inf if self.on_after_backward is None else 0

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average the connectors' gradients, which are in no DDP bucket; accumulated ones are equal already."""
        gradients = [parameter.grad for parameter in self._trained() if parameter.grad is not None]
        if gradients:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            torch.distributed.all_reduce(flat)
            flat /= trainer.world_size
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step == self._step:  # gradients accumulate
            return
        self._step = step
        if self.teachers.average is not None:
            self.teachers.average.update()
        if step % trainer.log_every_n_steps == 0 and self._sums is not None:  # type: ignore[attr-defined]  # a connector sets it
            total = trainer.strategy.reduce(self._sums, reduce_op="sum") if trainer.world_size > 1 else self._sums
            self._sums = None
            hard, soft, count = total.tolist()
            pl_module.write({"train/hard_loss": hard / count, "train/soft_loss": soft / count})

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        value = trainer.callback_metrics.get(pl_module.monitor)
        if value is not None and not trainer.sanity_checking:
            better = min if pl_module.monitor.partition("/")[2] in pl_module.minimised else max
            self.best = float(value) if self.best is None else better(self.best, float(value))

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.best is not None:
            metric = pl_module.monitor.partition("/")[2]
            self.teachers.compare(self.best, metric, lower=metric in pl_module.minimised)

    def report(self) -> dict[str, float]:
        return self.teachers.report()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            for undo in self._undo:
                undo()
            self.teachers.close()
            if self._capture is not None:
                self._capture.remove()
            self._undo, self.comparisons = [], []

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"step": self._step, "figures": self.teachers.metrics, "best": self.best}
        state["comparisons"] = [comparison.state_dict() for comparison in self.comparisons]
        if self.teachers.average is not None:
            state["average"] = self.teachers.average.state_dict()
        mine = torch.zeros(3, device=self._trainer.strategy.root_device) if self._sums is None else self._sums
        return {**state, "sums": [row.tolist() for row in everyones_tensors(mine)]}  # as the task saves them

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._step, self.teachers.metrics, self.best = state_dict["step"], state_dict["figures"], state_dict["best"]
        self._restored = state_dict["sums"]
        if self.teachers.average is not None and "average" in state_dict:
            self.teachers.average.load_state_dict(state_dict["average"])
        for comparison, state in zip(self.comparisons, state_dict["comparisons"], strict=False):
            comparison.load_state_dict(state)
