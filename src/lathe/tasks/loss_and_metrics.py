"""A user's loss and torchmetrics in a task.

A loss is a callable `(outputs, targets) -> scalar`, or several by name, whose sum is trained on. Of torchmetrics there
is a clone per split, updated with every batch, read and reset at the end of an epoch.
"""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.aggregation import BaseAggregator

from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, did_you_mean, user_location
from lathe.measure.processes import everyones
from lathe.tasks.base import SPLITS
from lathe.tasks.metric_state import load_metric_state, metric_state

CALL_ERRORS = (TypeError, ValueError, RuntimeError, IndexError, NotImplementedError)  # of wrong shapes and types
PREFIXES = {"classes": "Multiclass", "labels": "Multilabel"}  # of torchmetrics, by what a task predicts


class Weighted(nn.Module):
    """`weight` times a loss, which is a callable `(outputs, targets) -> scalar`."""

    @validated
    def __init__(self, weight: float, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight, self.loss = weight, loss

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.weight * self.loss(outputs, targets)


class OwnLoss:
    """The terms of a loss, on the outputs' device and in their dtype. It is not a submodule of the task: what a loss
    holds, such as class weights, comes from the configuration and not from a checkpoint.
    """

    def __init__(self, loss: Any) -> None:
        self.terms: dict[str, Any] = dict(loss.items()) if isinstance(loss, Mapping) else {"loss": loss}
        self._moved_to: tuple[torch.device, torch.dtype] | None = None
        if not self.terms:
            raise ArgumentError("loss={}: expected a loss, or several by name.")
        for name, term in self.terms.items():
            key = f"loss.{name}" if isinstance(loss, Mapping) else "loss"
            if not callable(term) or isinstance(term, type):
                raise ArgumentError(
                    f"{key}={describe(term)}: expected a callable (outputs, targets) -> scalar, such as "
                    "{_target_: torch.nn.CrossEntropyLoss}."
                )
            if isinstance(term, nn.Module) and any(p.requires_grad for p in term.parameters()):
                raise ArgumentError(
                    f"{key}={describe(term)} has trainable parameters, which no optimizer updates: freeze them, or put "
                    "them into the net."
                )

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the terms, each 0-dim."""
        self._move(outputs)
        return {name: self._term(name, outputs, targets) for name in self.terms}

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Try the terms on outputs like the net's and targets like the data's; one has to depend on the outputs."""
        with torch.enable_grad():
            outputs = outputs.detach().requires_grad_()
            self._move(outputs)
            terms = {name: self._term(name, outputs, targets) for name in self.terms}
        if not any(value.requires_grad for value in terms.values()):
            raise UserError(
                f"{self._key(next(iter(terms)))} has no gradient with respect to the outputs: compute it without "
                "detach(), item() or argmax()."
            )

    def divided(self) -> list[str]:
        """Return the names of losses whose mean depends on how samples are divided among batches."""
        return [
            type(part).__name__
            for term in self.terms.values()
            if isinstance(term, nn.Module)
            for part in term.modules()
            if isinstance(part, (nn.CrossEntropyLoss, nn.NLLLoss))
            and part.weight is not None
            and part.reduction == "mean"
        ]

    def _term(self, name: str, outputs: Tensor, targets: Tensor) -> Tensor:
        try:
            value = self.terms[name](outputs, targets)
        except torch.OutOfMemoryError:
            raise
        except CALL_ERRORS as error:
            inputs = f"outputs {shape(outputs)} and targets {shape(targets)}"
            raise UserError(f"{self._key(name)} does not accept {inputs}: {_reason(error)}") from error
        if not isinstance(value, Tensor) or value.dim():
            raise UserError(f"{self._key(name)} returns {_what(value)}: expected a scalar, such as the mean.")
        return value

    def _key(self, name: str) -> str:
        return f"task.loss{'' if name == 'loss' else f'.{name}'}={describe(self.terms[name])}"

    def _move(self, outputs: Tensor) -> None:
        target = (outputs.device, outputs.dtype)
        if target != self._moved_to:
            self._moved_to = target
            for term in self.terms.values():
                if isinstance(term, nn.Module):
                    term.to(*target)


def select_metrics(metrics: Any, known: Sequence[str]) -> tuple[list[str], dict[str, Metric]]:
    """Return what `metrics` asks for: names of `known`, and torchmetrics by name."""
    if isinstance(metrics, (str, Metric)) or not isinstance(metrics, (Mapping, Sequence)):
        raise ArgumentError(
            f"metrics={describe(metrics)}: expected a list of names and torchmetrics, or these by name."
        )

    def default_name(item: Any) -> str:
        """Return a metric's own name; that of MulticlassF1Score is f1_score."""
        plain = re.sub(r"^(Binary|Multiclass|Multilabel)(?=.)", "", type(item).__name__)
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", plain).lower()
        return item if isinstance(item, str) else snake

    pairs = metrics.items() if isinstance(metrics, Mapping) else ((default_name(item), item) for item in metrics)
    sums: list[str] = []
    objects: dict[str, Metric] = {}
    for name, item in pairs:
        if name in sums or name in objects or name == "loss":
            raise ArgumentError(f"metrics: two are called {name}. Give names: task.metrics={{mine: ..., other: ...}}.")
        if isinstance(item, str):
            if item not in known:
                raise ArgumentError(
                    f"metrics={item}: the task has no such metric; {did_you_mean(item, known)}; use _target_ for a "
                    "torchmetric."
                )
            if item != name:
                raise ArgumentError(f"metrics.{name}={item}: the task's own metrics keep their names. Use {item}.")
            sums.append(item)
            continue
        if not isinstance(item, Metric) or isinstance(item, BaseAggregator):
            raise ArgumentError(
                f"metrics.{name}={describe(item)}: expected a torchmetric of predictions and targets, such as "
                "torchmetrics.classification.MulticlassAUROC."
            )
        objects[name] = item
    return sums, objects


class Meters(nn.Module):
    """Torchmetrics by name, a set for each split. They move with the task, keep their dtype, and add nothing to its
    `state_dict`: a checkpoint keeps their states with the other metrics in progress, for each rank.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        super().__init__()
        self.names = tuple(metrics)
        # a metric of two classes takes the probability of the second
        self._binary = [type(metric).__name__.startswith("Binary") for metric in metrics.values()]
        for split in SPLITS:
            clones = [metric.clone() for metric in metrics.values()]
            for clone in clones:
                clone.reset()
                for module in clone.modules():
                    module._non_persistent_buffers_set.update(module._buffers)
                    if isinstance(module, Metric):
                        module.persistent(False)
                        module.sync_on_compute = False  # `_merge` does it
            self.add_module(f"{split}_metrics", nn.ModuleList(clones))

    def _apply(self, fn: Any, recurse: bool = True) -> "Meters":
        device = fn(torch.empty(0, dtype=torch.int64)).device  # integers move and are never cast
        for split in SPLITS:
            for metric in self._of(split):
                metric._apply(lambda tensor: tensor.to(device))
        return self

    def _of(self, split: str) -> Any:
        return getattr(self, f"{split}_metrics")

    def fresh(self) -> "Meters":
        """Return the same metrics, reset, on the same device."""
        return Meters(dict(zip(self.names, self._of("train"), strict=True)))

    @torch.no_grad()
    def update(self, split: str, predictions: Tensor, targets: Tensor) -> None:
        """Add a batch, whose rows all count."""
        if not len(targets):
            return
        for name, metric, binary in zip(self.names, self._of(split), self._binary, strict=True):
            takes_second = binary and predictions.dim() == 2 and predictions.shape[1] == 2 and targets.dim() == 1
            scores = predictions[:, 1] if takes_second else predictions
            try:
                metric.update(scores, targets)
            except torch.OutOfMemoryError:
                raise
            except CALL_ERRORS as error:
                raise UserError(
                    f"task.metrics.{name}: {describe(metric)} does not accept predictions {shape(scores)} and targets "
                    f"{shape(targets)}: {_reason(error)}"
                ) from error

    @torch.no_grad()
    def take(self, split: str, trainer: Trainer | None = None) -> dict[str, float]:
        """Return the metrics of a split over all processes, if it had samples, and reset them; a collective."""
        metrics = self._of(split)
        if trainer is not None and trainer.world_size > 1:
            _merge(metrics, trainer)
        values = {}
        for name, metric in zip(self.names, metrics, strict=True):
            if metric.update_count:
                key = f"task.metrics.{name}: {describe(metric)}"
                try:
                    value = metric.compute()
                except CALL_ERRORS as error:
                    raise UserError(f"{key} can't be computed: {_reason(error)}") from error
                if not isinstance(value, Tensor) or value.numel() != 1:
                    way = " (average=macro returns one)" if hasattr(metric, "average") else ""
                    raise UserError(f"{key} returns {_what(value)}: expected a scalar{way}.")
                values[name] = float(value)
            metric.reset()
        return values

    def check_kinds(self, predicts: str, width: int) -> None:
        """Raise UserError for a metric of another kind than the task's `width` classes or labels."""
        prefix = PREFIXES.get(predicts)
        if prefix is None:
            return
        for name, metric in zip(self.names, self._of("train"), strict=True):
            kind = type(metric).__name__
            own_prefix = next((known for known in ("Binary", *PREFIXES.values()) if kind.startswith(known)), prefix)
            if own_prefix == prefix or (own_prefix == "Binary" and (predicts == "labels" or width == 2)):
                continue
            raise UserError(
                f"task.metrics.{name}: {kind} does not fit {width} {predicts}. Use torchmetrics.classification."
                f"{prefix}{kind.removeprefix(own_prefix)}."
            )

    def check(self, predictions: Tensor, targets: Tensor) -> None:
        """Try the metrics on predictions and targets like the task's."""
        trial = self.fresh()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about these random samples
            trial.update("val", predictions, targets)
            trial.take("val")


def _merge(metrics: Sequence[Metric], trainer: Trainer) -> None:
    """Merge the states of all processes, in the order of ranks. Ranks that share a replica's samples (tensor
    parallelism) count once, ranks without outputs (all stages of a pipeline but the last) do not count.
    """
    sharing = trainer.distributed_sampler_kwargs
    replica = sharing["rank"] if sharing else trainer.global_rank
    mine = [[metric_state(part) for part in _parts(metric)] for metric in metrics]
    each = everyones((replica, mine))
    for number, metric in enumerate(metrics):
        rows: dict[int, list[dict[str, Any]]] = {}
        for rank, states in each:
            if states[number][0]["count"]:
                rows.setdefault(rank, states[number])
        for part, states in zip(_parts(metric), zip(*rows.values(), strict=True), strict=bool(rows)):
            load_metric_state(part, states[0] if len(states) == 1 else _reduce_states(part, states))


def _parts(metric: Metric) -> list[Metric]:
    """Return a metric and the metrics inside it."""
    return [module for module in metric.modules() if isinstance(module, Metric)]


def _reduce_states(metric: Metric, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    reductions: dict[str, Any] = dict(metric._reductions)
    for name, reduction in reductions.items():
        parts_by_rank = [state["values"][name] for state in states]
        if isinstance(parts_by_rank[0], list):
            values[name] = [part for parts in parts_by_rank for part in parts]
        else:
            stacked = torch.stack(parts_by_rank)
            values[name] = stacked if reduction is None else reduction(stacked)
    return {"count": sum(state["count"] for state in states), "values": values}


def describe(part: Any) -> str:
    """Return a loss or a metric as a user writes it."""
    if isinstance(part, (str, int, float, type(None))):
        return str(part)
    part = getattr(part, "func", part)  # of a node with _partial_
    kind = part if hasattr(part, "__name__") else type(part)
    return str(kind.__name__)


def shape(tensor: Tensor) -> str:
    """Return a tensor's shape and dtype as text."""
    return f"[{', '.join(map(str, tensor.shape))}] of {str(tensor.dtype).removeprefix('torch.')}"


def _what(value: Any) -> str:
    return f"a tensor {shape(value)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _reason(error: Exception) -> str:
    return f"{' '.join(str(error).split())[:300]}{user_location(error)}"
