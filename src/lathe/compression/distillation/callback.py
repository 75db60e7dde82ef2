"""Knowledge distillation: add a frozen teacher's term to the student's loss."""

import copy
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from pydantic import Field
from torch import Tensor, nn

from lathe.callbacks.ema import MovingAverage
from lathe.compression.callback import Compression, an_input
from lathe.compression.distillation import losses
from lathe.compression.distillation.losses import FEATURES, KEY, WEIGHTS, Capture, Comparison, Counted, Probe, add_terms
from lathe.compression.modes import copy_input
from lathe.compression.quantization.net import quantizers
from lathe.compression.structure import apply_structure
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
from lathe.data.transfer import val_batches
from lathe.errors import ArgumentError, UserError, require
from lathe.measure.calls import Call, output_of, run
from lathe.measure.processes import everyones_tensors, processes
from lathe.measure.shards import whole
from lathe.tasks.core import core_of, is_foreign

OpenRun = Callable[[str], nn.Module]
Layers = Name | Annotated[list[Any], Field(min_length=1)]


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
        factors = (
            weight if isinstance(weight, Mapping) else {} if weight is None else dict.fromkeys(self.methods, weight)
        )
        if not set(factors) <= set(self.methods):
            raise ArgumentError(f"weight={weight} names other methods than method={'+'.join(self.methods)}.")
        self.weights = {name: float(factors.get(name, WEIGHTS[name])) for name in self.methods}
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
            logits, kind, members = self.teachers.answers(x), outputs.device.type, self.teachers.shares
            # 16 bits are too imprecise for relations, and this part is cheap
            with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
                counted = counted_rows(outputs, batch)
                soft = add_terms(
                    [
                        share * comparison(outputs, logits[:, index], self._capture, counted)
                        for index, (share, comparison) in enumerate(zip(members, self.comparisons, strict=True))
                    ]
                )
            if self.warmup:
                soft = soft * min(1.0, (step - begin + 1) / max(1.0, self.warmup * (end - begin)))
            if self.alpha is not None:
                hard, soft = (1 - self.alpha) * hard, self.alpha * soft
            terms = {"hard": hard, "soft": soft}
            now = torch.stack((hard.detach().float(), soft.detach().float(), torch.ones((), device=soft.device)))
            self._sums = now if self._sums is None else self._sums + now
        if self._capture is not None:
            self._capture.features.clear()
        return terms

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
            probe = _probe_teacher(name_of(spec), teacher, example, student)
            self.comparisons.append(Comparison(self, student, probe, torch.initial_seed() + index))
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
        last_call: dict[str, Any] = {}  # of the last call of the core in a step

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            last_call["call"] = Call(args, kwargs).detach().map(Tensor.clone)

        def after(_: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
            last_call["outputs"] = outputs

        inner = module.training_step

        @wraps(inner)
        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            last_call.clear()
            returned = inner(batch, *args, **kwargs)
            if returned is None:
                return None
            outputs = output_of(last_call.get("outputs"))
            require(outputs is not None, f"{KEY}: {name}.training_step has no single tensor of the core to compare.")
            pair = batch[:2] if isinstance(batch, list | tuple) else None  # inputs and targets
            loss = returned["loss"] if isinstance(returned, Mapping) else returned
            terms = self._with_soft({"loss": loss}, cast(Tensor, outputs), last_call["call"].example, pair)
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
                theirs = [metrics[metric] for metrics in self.teachers.metrics if metric in metrics]
                best = min if metric in pl_module.minimised else max
                if theirs and best(score, *theirs) == score:
                    rank_zero_warn(
                        f"{KEY}.teacher={', '.join(map(name_of, self.teachers.specs))} is no better than its student: "
                        f"val/{metric} is {best(theirs):.4g} of the teacher and {score:.4g} of the student."
                    )

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


def _probe_teacher(name: str, net: nn.Module, example: Tensor | Call, student: Probe) -> Probe:
    """Probe a teacher; raise UserError if it can't take the inputs or its outputs differ in shape."""
    tensor = example if isinstance(example, Tensor) else next(iter(example.tensors().values()))
    shape = list(tensor.shape[1:])
    try:
        probe = Probe.of(net, example)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise UserError(
            f"{KEY}.teacher={name} can't take this data's inputs of shape {shape} "
            f"({' '.join(str(error).split())}): take a teacher that was trained on the same data."
        ) from error
    require(
        probe.output.shape == student.output.shape,
        f"{KEY}.teacher={name} gives outputs of shape {list(probe.output.shape[1:])} and the student "
        f"{list(student.output.shape[1:])}: take a teacher that was trained on the same classes.",
    )
    return probe


class Teachers:
    """Teachers that are not submodules, so that no checkpoint, hyper-parameter or DDP bucket has them.

    `teacher` is a run directory, "ema", {"net": net, "weights": path}, or a list. `weights` are those of the soft term
    (None: equal); `cache` MiB of their logits are cached.
    """

    def __init__(self, teacher: Any, weights: Sequence[float] | None, ema_decay: float, cache: float) -> None:
        several = isinstance(teacher, Sequence) and not isinstance(teacher, str)
        self.specs: list[Any] = list(teacher) if several else [teacher]
        require(bool(self.specs), f"{KEY}.teacher=[] names no teacher: give the directory of a finished run.")
        for spec in self.specs:
            require(
                isinstance(spec, str | Path)
                or (
                    isinstance(spec, Mapping) and set(spec) == {"net", "weights"} and isinstance(spec["net"], nn.Module)
                ),
                f"{KEY}.teacher={spec!r:.80}: give a finished run's directory, ema, or {{net: ..., weights: ...}}.",
            )
        require(len(self.specs) == 1 or "ema" not in self.specs, f"{KEY}.teacher={teacher}: ema teaches alone.")
        factors = weights or [1.0] * len(self.specs)
        if len(factors) != len(self.specs):
            raise ArgumentError(f"teacher_weights={weights}: give {len(self.specs)} numbers, one for each teacher.")
        if cache and "ema" in self.specs:
            raise ArgumentError(f"cache={cache} needs a teacher that does not change, unlike teacher=ema: set cache=0.")
        self.shares = [value / sum(factors) for value in factors]
        self.ema_decay = ema_decay
        self.cache = LogitCache(int(cache * 2**20)) if cache else None
        self.average: Average | None = None
        self.nets: list[nn.Module] = []
        self.metrics: list[dict[str, float]] = []  # of each teacher on the validation split
        self._dtype = torch.float32

    def open(self, open_run: OpenRun | None, student: nn.Module | None = None) -> None:
        """Open the teachers on the CPU, unless they are open; an average needs the `student`."""
        if self.specs == ["ema"]:
            if student is not None:
                self.average = Average(student, self.ema_decay)
                self.nets = [self.average.net]
        elif not self.nets:
            self.nets = [open_teacher(spec, open_run) for spec in self.specs]

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the teachers; an average keeps at least float32."""
        self._dtype = torch.float32 if self.average is not None else dtype
        for net in self.nets:
            net.to(device, self._dtype)

    def answers(self, x: Any) -> Tensor:
        """Return all teachers' logits for the net's input: [batch, teachers, ..., classes]."""
        return self._compute(x) if self.cache is None else self.cache.get(x, self._compute)

    @torch.no_grad()
    def _compute(self, x: Any) -> Tensor:
        answers = [cast(Tensor, output_of(run(net, self._cast(x)))) for net in self.nets]
        return answers[0].unsqueeze(1) if len(answers) == 1 else torch.stack(answers, dim=1)

    def _cast(self, x: Any) -> Any:
        if isinstance(x, Call):
            return x.map(self._cast)
        return x.to(self._dtype) if x.is_floating_point() else x

    def evaluate(self, trainer: Trainer, task: Any) -> None:
        """Evaluate the teachers on the validation split, over all ranks, and log the monitored metric."""
        monitored = str(task.monitor).partition("/")[2]
        for index, net in enumerate(self.nets):
            totals: list[Tensor] = []
            meters = None if task.meters is None else task.meters.fresh()
            precision = trainer.precision_plugin.forward_context()
            with torch.random.fork_rng(devices=[]), torch.no_grad(), precision, ExitStack() as after:
                after.callback(setattr, task, "training", task.training)
                task.training = False  # its own flag alone: losses without label smoothing and padding rows
                for batch in val_batches(trainer.datamodule):  # type: ignore[attr-defined]
                    answer = net(self._cast(batch[0]))
                    loss = torch.stack(list(task.losses(answer, batch).values())).sum()
                    totals.append(task.reduce(answer, batch, loss))
                    if meters is not None:
                        meters.update("val", *task.scored(answer, batch))
            own = {} if meters is None else meters.take("val", trainer)
            means = {name.partition("/")[2]: value for name, value in task._means("val", sum(totals)).items()}
            self.metrics.append({**means, **own})
            task.write({f"{self._prefix(index)}_{monitored}": self.metrics[-1][monitored]})

    def report(self) -> dict[str, float]:
        return {
            f"{self._prefix(i)}_{name}": value
            for i, metrics in enumerate(self.metrics)
            for name, value in metrics.items()
        }

    def _prefix(self, index: int) -> str:
        return "distill/teacher" if len(self.specs) == 1 else f"distill/teacher{index + 1}"


def name_of(spec: Any) -> str:
    """Return a teacher's name in messages."""
    return "net" if isinstance(spec, Mapping) else str(spec)


def open_teacher(spec: Any, open_run: OpenRun | None) -> nn.Module:
    """Return the net of a run directory or of {"net", "weights"}, frozen in eval mode, on the CPU."""
    if isinstance(spec, Mapping):
        net: nn.Module = spec["net"]
        load_weights(net, str(spec["weights"]))
        return frozen(net)
    if open_run is None:
        raise UserError(f"{KEY}.teacher={spec}: set the callback's open_run, or give a net with its weights.")
    return frozen(open_run(str(spec)))


def frozen(net: nn.Module) -> nn.Module:
    """Freeze a net in eval mode; it gets copies of its inputs."""
    net.register_forward_pre_hook(copy_input)
    return net.eval().requires_grad_(False)


def load_weights(net: nn.Module, path: str) -> None:
    """Load a checkpoint, or a state dict that torch.save has written, after its changes of structure."""
    key = f"{KEY}.teacher.weights={path}"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or malicious file can raise nearly anything
        raise UserError(f"{key} can't be read ({' '.join(str(error).split())[:80]}): give a checkpoint.") from error
    weights: Any = state.get("state_dict", state) if isinstance(state, dict) else {}
    tensors = isinstance(weights, dict) and all(
        isinstance(tensor, Tensor) and not tensor.is_meta for tensor in weights.values()
    )
    require(bool(weights) and tensors, f"{key} does not hold plain tensors: give a checkpoint, or a state dict.")
    apply_structure(net, state.get("structure", {}))
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{key} does not fit {KEY}.teacher.net ({reason}).") from error


class Average:
    """A teacher that is the moving average of its student (Tarvainen and Valpola 2017, arXiv:1703.01780).

    After each optimizer step, `average = decay * average + (1 - decay) * weights`; update t uses min(decay, (1 + t) /
    (10 + t)). Create it before a strategy shards the net: every rank holds the whole average, in at least float32.
    Buffers are averaged too, and are rank 0's. Fake quantization is off in the teacher.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.net = frozen(copy.deepcopy(net))
        for quantizer in quantizers(self.net):
            quantizer.switch(enabled=False)
        self._average = MovingAverage(decay)
        self._live: list[Tensor] = []
        self._buffers: list[int] = []

    def tensors(self) -> dict[str, Tensor]:
        """Return the averaged tensors by name: all of floating point except the quantizers'."""
        return {
            name: tensor
            for name, tensor in self.net.state_dict(keep_vars=True).items()
            if tensor.is_floating_point() and "quantizer" not in name
        }

    def bind(self, student: nn.Module) -> None:
        """Find the student's tensors, in each epoch: another callback may have replaced some.

        Raises:
            UserError: a rank does not hold whole parameters (deepspeed_3), or a shape has changed.
        """
        live, own = student.state_dict(keep_vars=True), self.tensors()
        names = [name for name in own if name in live]
        require(
            not any(hasattr(live[name], "ds_id") for name in names),
            f"{KEY}.teacher=ema needs whole weights, and deepspeed_3 has parts: use fsdp, deepspeed_2 or ddp.",
        )
        changed = [name for name in names if live[name].shape != own[name].shape]
        require(
            not changed,
            f"{KEY}.teacher=ema can't follow {changed}, whose shapes another method changes: give a finished run.",
        )
        self._live = [live[name] for name in names]
        self._average.tensors = [own[name].detach() for name in names]
        self._buffers = [i for i, tensor in enumerate(self._live) if not isinstance(tensor, nn.Parameter)]

    @torch.no_grad()
    def update(self) -> None:
        """Update the average after an optimizer step. A collective for sharded parameters and for buffers."""
        live = [whole(tensor).to(average) for tensor, average in zip(self._live, self._average.tensors, strict=True)]
        if self._buffers and processes() > 1:
            flat = torch.cat([live[i].flatten() for i in self._buffers])
            torch.distributed.broadcast(flat, src=0)
            parts = flat.split([live[i].numel() for i in self._buffers])
            for i, part in zip(self._buffers, parts, strict=True):
                live[i] = part.view(live[i].shape)
        self._average.update(live)

    def state_dict(self) -> dict[str, Any]:
        average = {name: tensor.detach().clone() for name, tensor in self.tensors().items()}
        return {"updates": self._average.updates, "average": average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._average.updates = state["updates"]
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.detach().copy_(state["average"][name])


class LogitCache:
    """Logits by input, at most `limit` bytes of them; the oldest are dropped first.

    The key of a row is a hash of its content, so that crops of a sample differ.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.rows: dict[bytes, Tensor] = {}
        self.lookups = self.hits = self.saved = 0  # rows requested, cached rows, and rows that were not computed
        self._warned = False

    def get(self, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `compute(x)` [batch, ...], cached or computed; one new row computes the whole batch.

        Waits for the device.
        """
        content = x.detach().cpu().contiguous().view(len(x), -1).view(torch.uint8).numpy()
        keys = [hashlib.blake2b(row, digest_size=16).digest() for row in content]
        self.lookups += len(keys)
        known = sum(key in self.rows for key in keys)
        self.hits += known
        if known == len(keys):
            self.saved += known
            return torch.stack([self.rows[key] for key in keys])
        logits = compute(x)
        size = logits[0].numel() * logits.element_size()
        for key, row in zip(keys, logits.detach(), strict=True):
            self.rows.setdefault(key, row.clone())  # a view would keep the memory of the whole batch
        while len(self.rows) * size > self.limit:
            del self.rows[next(iter(self.rows))]
        return logits

    def warn_if_useless(self) -> None:
        if self.lookups and not self.saved and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{KEY}.cache answered no batch: {self.hits or 'none'} of {self.lookups} inputs came twice, and it has "
                f"{len(self.rows)}. Give it more MiB, or set cache=0 with augmentation."
            )
