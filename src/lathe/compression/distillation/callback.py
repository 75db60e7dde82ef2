"""Knowledge distillation: add a frozen teacher's term to the student's loss."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial, wraps
from typing import Annotated, Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from pydantic import Field
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lathe.compression.callback import Compression, an_input
from lathe.compression.distillation import losses
from lathe.compression.distillation.teacher import KEY, OpenRun, Teachers, name_of
from lathe.compression.modes import copy_input, evaluated
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
from lathe.data.order import IGNORE
from lathe.errors import ArgumentError, UserError, require
from lathe.measure.calls import Call, output_of, run
from lathe.measure.processes import everyones_tensors, processes
from lathe.tasks.core import core_of, is_foreign

# Factor of each method's term: 1 in DKD's and DIST's papers, the CRD repository's for the others.
WEIGHTS = {"kd": 1.0, "dkd": 1.0, "dist": 1.0, "fitnets": 100.0, "attention": 1000.0, "rkd": 1.0, "crd": 0.8}
FEATURES = ("fitnets", "attention", "rkd", "crd")  # methods that compare layers
Layers = Name | Annotated[list[Any], Field(min_length=1)]
Shape = tuple[int, ...]


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

    every_step = ("on_train_batch_end",)

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
        student_layers: Layers | None = None,
        teacher_layers: Layers | None = None,
        cache: NonNegative = 0,
    ) -> None:
        self.methods = method.split("+") if isinstance(method, str) else list(method)
        if len(set(self.methods)) != len(self.methods):
            raise ArgumentError(f"method={method} names a method twice: name different ones of {', '.join(WEIGHTS)}.")
        given = weight if isinstance(weight, Mapping) else {} if weight is None else dict.fromkeys(self.methods, weight)
        if not set(given) <= set(self.methods):
            raise ArgumentError(f"weight={weight} names other methods than method={'+'.join(self.methods)}.")
        self.weights = {name: float(given.get(name, WEIGHTS[name])) for name in self.methods}
        if cache and set(self.methods) & set(FEATURES):
            raise ArgumentError(
                f"cache={cache} keeps logits alone, and {'+'.join(self.methods)} needs layers: set cache=0."
            )
        logits: dict[str, Any] = {"temperature": temperature}
        functions: dict[str, Callable[..., Tensor]] = {
            "kd": partial(losses.kd, **logits),
            "dkd": partial(losses.dkd, **logits, target_weight=target_weight, other_weight=other_weight),
            "dist": partial(losses.dist, **logits, between_weight=between_weight, within_weight=within_weight),
            "fitnets": losses.hint,
            "attention": losses.attention,
            "rkd": partial(losses.rkd, distance_weight=distance_weight, angle_weight=angle_weight),
            "crd": partial(losses.crd, temperature=crd_temperature),
        }
        self.losses = {name: functions[name] for name in self.methods}
        self.crd_features, self.crd_queue = crd_features, crd_queue
        self.layers = student_layers, teacher_layers
        self.teachers = Teachers(teacher, teacher_weights, ema_decay, cache)
        self.alpha = 0.9 if alpha is None and self.methods == ["kd"] else alpha
        self.warmup = warmup
        self.open_run: OpenRun | None = None  # opens the net of a run directory; set by the training
        self.comparisons: list[Comparison] = []
        self._capture: Capture | None = None  # the student's layers
        self._undo: list[Callable[[], object]] = []
        self._sums: Tensor | None = None  # [3]: sums of hard, soft and 1 over the steps since the last logged one
        self._restored: list[list[float]] | None = None
        self._steps = (0, 0)  # the window's first optimizer step, and the first one after it
        self._step = -1
        self._filled = 0  # the first epoch at which the cache is judged

    def objective(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        """Return the two terms of the loss; outside the window, the task's own terms."""
        return self._with_soft(self._inner(outputs, batch), outputs, batch[0], batch)

    def _with_soft(self, terms: dict[str, Tensor], outputs: Tensor, x: Any, batch: Any) -> dict[str, Tensor]:
        """Add the teachers' term for the input `x` of the net to the terms of the loss."""
        (begin, end), step = self._steps, self._trainer.global_step
        if begin <= step < end:
            hard = torch.stack(list(terms.values())).sum() if len(terms) > 1 else next(iter(terms.values()))
            soft = self._soft(outputs, x, batch)
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

    def _soft(self, outputs: Tensor, x: Any, batch: Any) -> Tensor:
        logits = self.teachers.answers(x)
        kind = outputs.device.type
        # 16 bits are too imprecise for relations, and this part is cheap
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            counted = counted_rows(outputs, batch)
            terms = [
                share * comparison(outputs, logits[:, index], self._capture, counted)
                for index, (share, comparison) in enumerate(zip(self.teachers.shares, self.comparisons, strict=True))
            ]
        return _sum(terms)

    def check(self, net: nn.Module) -> None:
        self.teachers.open(self.open_run)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._trainer, task = trainer, pl_module
        net = core_of(task)
        example = an_input(trainer, task, 2, next(net.parameters()).device)
        self.teachers.open(self.open_run, net)
        if is_foreign(task):
            self._join_step(task, net, example)
        self._undo.append(net.register_forward_pre_hook(copy_input).remove)  # the teachers read the batch afterwards
        student = Probe.of(net, example)
        for index, (spec, teacher) in enumerate(zip(self.teachers.specs, self.teachers.nets, strict=True)):
            found = _probe_teacher(name_of(spec), teacher, example, student)
            self.comparisons.append(Comparison(self, student, found, torch.initial_seed() + index))
        names = [ours for comparison in self.comparisons for pairs in comparison.pairs.values() for ours, _ in pairs]
        self._capture = Capture(net, names, training_only=True) if names else None
        if trained := self._trained():
            self._join(trainer, task, trained)
        if not trained or trainer.world_size == 1:
            self.on_after_backward = None  # type: ignore[assignment]  # Lightning skips it
        if is_foreign(task):
            return
        inner: Any = task.objective
        self._inner: Callable[[Any, Any], dict[str, Tensor]] = inner
        task.objective = self.objective  # type: ignore[assignment]
        self._undo.append(lambda: setattr(task, "objective", inner))

    def _join_step(self, module: LightningModule, net: nn.Module, example: Any) -> None:
        """Add the teachers' term to what `training_step` of a user's LightningModule returns."""
        name = type(module).__name__
        require(
            module.automatic_optimization,
            f"{KEY} adds to the loss that training_step returns, and {name} has manual optimization: use prune or qat.",
        )
        require(
            self.teachers.cache is None or isinstance(example, Tensor),
            f"{KEY}.cache is for a net with one input: set cache=0.",
        )
        found: dict[str, Any] = {}  # of the last call of the core in a step

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found["call"] = Call(args, kwargs).detach().map(Tensor.clone)

        def after(_: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
            found["outputs"] = outputs

        inner = module.training_step

        @wraps(inner)
        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            found.clear()
            returned = inner(batch, *args, **kwargs)
            if returned is None:
                return None
            outputs = output_of(found.get("outputs"))
            require(outputs is not None, f"{KEY}: {name}.training_step has no single tensor of the core to compare.")
            pair = batch[:2] if isinstance(batch, list | tuple) else None  # inputs and targets
            loss = returned["loss"] if isinstance(returned, Mapping) else returned
            terms = self._with_soft({"loss": loss}, cast(Tensor, outputs), found["call"].example, pair)
            total = sum(terms.values())
            return {**returned, "loss": total} if isinstance(returned, Mapping) else total

        vars(module)["training_step"] = training_step
        handles = (
            net.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            net.register_forward_hook(after),
        )
        self._undo += [*(handle.remove for handle in handles), lambda: vars(module).pop("training_step")]

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for comparison in self.comparisons for parameter in comparison.connectors.parameters()]

    def _join(self, trainer: Trainer, task: Any, trained: list[nn.Parameter]) -> None:
        """Add the connectors to the run's optimizer."""
        strategy = trainer.strategy
        whole = isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)
        require(
            whole and not hasattr(strategy, "shard") and not is_foreign(task),
            f"{KEY}.method={'+'.join(self.methods)} trains connectors, which neither a LightningModule nor "
            f"{type(strategy).__name__} takes: use strategy=ddp, or method=kd, dkd, dist, attention or rkd.",
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
        dtype = next(p.dtype for p in core_of(pl_module).parameters() if p.is_floating_point())
        self.teachers.to(pl_module.device, dtype)
        for comparison in self.comparisons:
            comparison.to(pl_module.device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        average = self.teachers.average
        if average is not None:
            average.bind(core_of(pl_module))
            # the checkpoint may have been written between an optimizer step and its update
            if 0 <= self._step < trainer.global_step:
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
        if average is None and not self.teachers.metrics and not is_foreign(pl_module):
            self.teachers.evaluate(trainer, pl_module)
            for comparison in self.comparisons:
                comparison.forget()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.teachers.average is not None:
            self.teachers.average.bind(core_of(pl_module))
        if self.teachers.cache is not None and trainer.current_epoch >= self._filled:
            self.teachers.cache.warn_if_useless()

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
            metrics = {"train/hard_loss": hard / count, "train/soft_loss": soft / count}
            if not is_foreign(pl_module):
                pl_module.write(metrics)
            for logger in trainer.loggers if is_foreign(pl_module) else ():
                logger.log_metrics({**metrics, "epoch": trainer.current_epoch}, step=step)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        for callback in trainer.checkpoint_callbacks:
            score = getattr(callback, "best_score", None)
            if score is not None and not is_foreign(pl_module) and callback.monitor == pl_module.monitor:  # type: ignore[attr-defined]
                metric = pl_module.monitor.partition("/")[2]
                self.teachers.compare(score, metric, lower=metric in pl_module.minimised)

    def report(self) -> dict[str, float]:
        return self.teachers.report()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            captures = [self._capture, *(comparison.capture for comparison in self.comparisons)]
            for undo in [*self._undo, *(capture.remove for capture in captures if capture is not None)]:
                undo()
            self._undo, self.comparisons, self.teachers.nets = [], [], []

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"step": self._step, "figures": self.teachers.metrics}
        state["comparisons"] = [comparison.state_dict() for comparison in self.comparisons]
        if self.teachers.average is not None:
            state["average"] = self.teachers.average.state_dict()
        mine = torch.zeros(3, device=self._trainer.strategy.root_device) if self._sums is None else self._sums
        return {**state, "sums": [row.tolist() for row in everyones_tensors(mine)]}  # as the task saves them

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._step, self.teachers.metrics = state_dict["step"], state_dict["figures"]
        self._restored = state_dict["sums"]
        if self.teachers.average is not None and "average" in state_dict:
            self.teachers.average.load_state_dict(state_dict["average"])
        for comparison, state in zip(self.comparisons, state_dict["comparisons"], strict=False):
            comparison.load_state_dict(state)


Counted = tuple[Tensor | None, Tensor | None, Tensor | None]


def counted_rows(outputs: Tensor, batch: Any) -> Counted:
    """Return targets, weights of rows and their sum, of a batch `(x, y)` or `(x, y, count)` as tasks have.

    Targets are int64 [rows] or probabilities [rows, classes]; rows with the target -100 are padding. None: no target
    for each row, all rows count, and the sum of the weights.
    """
    several = isinstance(batch, list | tuple) and len(batch) > 1
    target = batch[1] if several and isinstance(batch[1], Tensor) else None
    if target is None or target.shape[: outputs.dim() - 1] != outputs.shape[:-1]:
        return None, None, None
    if target.is_floating_point():
        return target.flatten(0, -2), None, None
    flat = target.flatten()
    return flat, flat != IGNORE, batch[2] if len(batch) > 2 else None


class Comparison:
    """Terms of one teacher, with connectors and `crd`'s queue: equal on all ranks, in neither net."""

    def __init__(self, options: Distill, student: "Probe", teacher: "Probe", seed: int) -> None:
        self.weights, self.losses = options.weights, options.losses
        self.channels: dict[str, int] = {}  # of the student's layers, in the unsharded net
        self.connectors = nn.ModuleDict()
        self.queue: losses.Queue | None = None
        self._pending: tuple[Tensor, Tensor] | None = None  # pushed to the queue after the backward pass
        self.pairs = {
            method: pairs_of(method, student, teacher, options.layers) for method in self.weights if method in FEATURES
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for method, pairs in self.pairs.items():
                for index, (ours, theirs) in enumerate(pairs):
                    shapes = student.shapes[ours], teacher.shapes[theirs]
                    self.channels[ours] = _channels(shapes[0])
                    if method == "fitnets":
                        self.connectors[f"fitnets_{index}"] = losses.connector(*shapes)
                    if method == "crd":
                        mine, other = (math.prod(shape) for shape in shapes)
                        self.connectors[f"crd_{index}"] = losses.Projections(mine, other, options.crd_features)
        if "crd" in self.pairs:
            require(len(self.pairs["crd"]) == 1, f"{KEY}.student_layers: crd compares one embedding. Name one layer.")
            self.queue = losses.Queue(options.crd_queue, options.crd_features) if options.crd_queue else None
        names = [theirs for pairs in self.pairs.values() for _, theirs in pairs]
        self.capture = Capture(teacher.net, names, training_only=False) if names else None

    def to(self, device: torch.device) -> None:
        self.connectors.to(device)
        if self.queue is not None:
            self.queue.embeddings, self.queue.labels = self.queue.embeddings.to(device), self.queue.labels.to(device)

    def __call__(self, outputs: Tensor, logits: Tensor, ours: "Capture | None", counted: Counted) -> Tensor:
        """Return the weighted sum of the terms: 0-dim, in at least float32. Call without autocast."""
        terms = [weight * self._term(name, outputs, logits, ours, counted) for name, weight in self.weights.items()]
        self.forget()
        return _sum(terms)

    def forget(self) -> None:
        """Discard the teacher's features of the last forward pass."""
        if self.capture is not None:
            self.capture.found.clear()

    def _term(self, method: str, outputs: Tensor, logits: Tensor, ours: "Capture | None", counted: Counted) -> Tensor:
        loss, (target, rows, count) = self.losses[method], counted
        if method == "kd":
            return loss(outputs, logits, rows=rows, count=count)
        if method == "dkd":
            if target is None:
                raise UserError(f"{KEY}.method=dkd needs a target for each row of logits: use kd.")
            return loss(outputs, logits, target, rows=rows, count=count)
        if method == "dist":
            return loss(outputs, logits, rows=rows)
        assert ours is not None
        assert self.capture is not None
        terms = []
        for index, (mine, other) in enumerate(self.pairs[method]):
            features = ours.take(mine)
            require(
                _channels(features.shape[1:]) == self.channels[mine],
                f"{KEY}: the strategy or another method has removed channels of {mine}, which {method} can't compare: "
                "use method=kd, dkd or dist.",
            )
            terms.append(self._feature(method, index, features, self.capture.take(other), target, rows))
        return _sum(terms)

    def _feature(
        self, method: str, index: int, ours: Tensor, theirs: Tensor, target: Tensor | None, rows: Tensor | None
    ) -> Tensor:
        loss = self.losses[method]
        if method == "fitnets":
            link: Any = self.connectors[f"fitnets_{index}"]
            if rows is not None and ours.dim() == 3 and len(rows) == len(ours):
                rows = rows.repeat_interleave(ours.shape[1])
            return loss(link(ours.to(link.weight.dtype)), theirs, rows)
        if method != "crd":
            return loss(ours, theirs, rows=rows)
        self.flush()
        mine, other = self.connectors[f"crd_{index}"](ours, theirs)
        hard = None if target is None or target.is_floating_point() else target
        if self.queue is not None:
            self._pending = _everyones(other, hard)
        return loss(mine, other, hard, self.queue, rows=rows)

    def flush(self) -> None:
        """Push the last batch's embeddings; the backward pass needs the queue before that."""
        if self.queue is not None and self._pending is not None:
            self.queue.push(*self._pending)
            self._pending = None

    def state_dict(self) -> dict[str, Any]:
        self.flush()
        state: dict[str, Any] = {"connectors": {k: v.detach().clone() for k, v in self.connectors.state_dict().items()}}
        if self.queue is not None:
            queue = self.queue
            state |= {"queue": queue.embeddings.clone(), "labels": queue.labels.clone(), "next": queue.next}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.connectors.load_state_dict(state["connectors"])
        if self.queue is not None and "queue" in state:
            self.queue.embeddings.copy_(state["queue"])
            self.queue.labels.copy_(state["labels"])
            self.queue.next = state["next"]


def _sum(terms: list[Tensor]) -> Tensor:
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum()


def _channels(shape: Shape) -> int:
    """Return the channels of a feature shape without the batch: the first of three sizes, else the last."""
    return shape[0] if len(shape) == 3 else shape[-1]


def _everyones(embeddings: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return all ranks' embeddings and labels in the order of ranks, so that queues are equal."""
    embeddings = embeddings.detach().contiguous()
    labels = torch.full((len(embeddings),), -2, device=embeddings.device) if labels is None else labels.contiguous()
    if processes() > 1:
        embeddings, labels = torch.cat(everyones_tensors(embeddings)), torch.cat(everyones_tensors(labels))
    return embeddings, torch.where(labels == IGNORE, -1, labels)  # a padding row counts as an empty place


@dataclass
class Probe:
    """A net's output, and each layer's output shape without the batch, in call order.

    `head` is the last linear layer, `embedding` the shape of its input.
    """

    net: nn.Module
    output: Tensor = field(default_factory=lambda: torch.empty(0))
    shapes: dict[str, Shape] = field(default_factory=dict)
    head: str | None = None
    embedding: Shape = ()

    @classmethod
    def of(cls, net: nn.Module, x: Tensor | Call) -> "Probe":
        """Run `net` on `x` [batch, ...] once, in eval mode and uncompiled, and leave it unchanged."""
        found = cls(net)

        def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and name:
                found.shapes[name] = tuple(output.shape[1:])
                if isinstance(module, nn.Linear):
                    found.head, found.embedding = name, tuple(inputs[0].shape[1:])

        handles = [module.register_forward_hook(partial(look, name)) for name, module in net.named_modules()]
        with evaluated(net, handles), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            outputs = run(net, x)
        output = output_of(outputs)
        require(output is not None, f"{KEY}: {type(net).__name__} returns several tensors, none of them named logits.")
        found.output = cast(Tensor, output)
        return found

    def stage_ends(self) -> list[str]:
        """Return the last of each run of `net.blocks` with one output shape; empty for a net without `blocks`."""
        names = [name for name in self.shapes if name.startswith("blocks.") and name.count(".") == 1]
        after = [self.shapes[name] for name in names[1:]]
        return [name for name, later in zip(names, [*after, None], strict=True) if self.shapes[name] != later]

    def match(self, key: str, patterns: Sequence[str]) -> list[str]:
        """Return the layers that match `patterns` (`*` for anything), in the order of patterns and calls."""
        chosen: dict[str, None] = {}
        for pattern in patterns:
            matching = [name for name in self.shapes if fnmatchcase(name, pattern)]
            require(bool(matching), f"{KEY}.{key}={pattern} matches no layer: choose among {self.listed()}.")
            chosen |= dict.fromkeys(matching)
        return list(chosen)

    def listed(self) -> str:
        """Return the first dozen layers with their shapes, for messages."""
        return ", ".join(f"{name} {list(shape)}" for name, shape in list(self.shapes.items())[:12])


def _probe_teacher(name: str, net: nn.Module, example: Tensor | Call, student: Probe) -> Probe:
    """Probe a teacher; raise UserError if it can't take the inputs or its outputs differ in shape."""
    tensor = example if isinstance(example, Tensor) else next(iter(example.tensors().values()))
    shape = list(tensor.shape[1:])
    try:
        found = Probe.of(net, example)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise UserError(
            f"{KEY}.teacher={name} can't take this data's inputs of shape {shape} "
            f"({' '.join(str(error).split())}): take a teacher that was trained on the same data."
        ) from error
    require(
        found.output.shape == student.output.shape,
        f"{KEY}.teacher={name} gives outputs of shape {list(found.output.shape[1:])} and the student "
        f"{list(student.output.shape[1:])}: take a teacher that was trained on the same classes.",
    )
    return found


def fits(method: str, student: Shape, teacher: Shape) -> bool:
    """Return whether a feature method can compare features of these shapes, without the batch."""
    if method == "attention":
        pairs = list(zip(student[1:], teacher[1:], strict=False))
        return len(student) == len(teacher) == 3 and all(max(pair) % min(pair) == 0 for pair in pairs)
    if method == "fitnets":
        places = (student[1:], teacher[1:]) if len(student) == 3 else (student[:-1], teacher[:-1])
        return len(student) == len(teacher) <= 3 and places[0] == places[1]
    return all(len(shape) in (1, 3) for shape in (student, teacher))  # rkd and crd: one vector per sample


def pairs_of(method: str, student: Probe, teacher: Probe, layers: tuple[Any, Any]) -> list[tuple[str, str]]:
    """Return the layers of student and teacher that a feature method compares.

    By default: the input of the head, written `<head>.input`, for rkd and crd; the last blocks of all stages for
    attention, of the middle stage for fitnets. Raises UserError if a pattern matches nothing, or numbers or shapes
    differ.
    """
    chosen: list[list[str]] = []
    for key, given, found in zip(("student_layers", "teacher_layers"), layers, (student, teacher), strict=True):
        if given is not None:
            chosen.append(found.match(key, [given] if isinstance(given, str) else list(given)))
        elif method in ("rkd", "crd") and found.head is not None:
            found.shapes[f"{found.head}.input"] = found.embedding
            chosen.append([f"{found.head}.input"])
        else:
            ends = found.stage_ends()
            require(
                bool(ends),
                f"{KEY}.{key}=null: the net names no blocks for {method}; choose among {found.listed()}.",
            )
            chosen.append([ends[len(ends) // 2]] if method == "fitnets" else ends)
    ours, theirs = chosen
    require(
        len(ours) == len(theirs),
        f"{KEY}.student_layers are {', '.join(ours)} and teacher_layers {', '.join(theirs)}: give as many of one as of "
        "the other.",
    )
    pairs = list(zip(ours, theirs, strict=True))
    for mine, other in pairs:
        shapes = student.shapes[mine], teacher.shapes[other]
        able = [name for name, shape in student.shapes.items() if fits(method, shape, shapes[1])]
        require(
            fits(method, *shapes),
            f"{KEY}.student_layers={mine} gives {list(shapes[0])}, which {method} can't compare with {list(shapes[1])} "
            f"of the teacher's {other}. Choose among the student's {', '.join(able[:12]) or 'none'}.",
        )
    return pairs


class Capture:
    """Store the outputs of layers of `net` in a forward pass, by name; `<name>.input` is a layer's input.

    Hooks have to be set before a net is compiled, whose graph then returns these tensors too. With `training_only`,
    evaluation stores nothing.
    """

    def __init__(self, net: nn.Module, names: Sequence[str], training_only: bool) -> None:
        self.found: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        found = self.found  # hooks must not refer to this object, which the compiler would trace

        def keep(name: str, module: nn.Module, tensor: Tensor) -> None:
            if module.training or not training_only:
                found[name] = tensor.clone()  # the layer, or the next one, may modify it in place

        for name in dict.fromkeys(names):
            inner = name.removesuffix(".input")
            module = net.get_submodule(inner)
            if inner != name:
                hook = module.register_forward_pre_hook(lambda module, inputs, name=name: keep(name, module, inputs[0]))
            else:
                hook = module.register_forward_hook(lambda module, _, output, name=name: keep(name, module, output))
            self._handles.append(hook)

    def take(self, name: str) -> Tensor:
        """Return a layer's features; raise UserError if it was not called, or this rank has only a shard."""
        tensor = self.found.get(name)
        if tensor is None or hasattr(tensor, "device_mesh"):
            why = "is sharded" if tensor is not None else "was not called as a module"
            raise UserError(f"{KEY}: the layer {name} {why}: use strategy=ddp, or method=kd, dkd or dist.")
        return tensor

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.found.clear()
