"""A task's torchmetrics: a clone for each split, updated with every batch, read and reset at the end of an epoch."""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.aggregation import BaseAggregator

from lathe.errors import ArgumentError, UserError, did_you_mean, refuse, user_location
from lathe.tasks import ranks
from lathe.tasks.loss import CALL, named, shape

SPLITS = ("train", "val", "test")
# what torchmetrics of classification are named by: what they are of, and their argument that says how many
FORMS = {
    "Binary": ("two classes", ""),
    "Multiclass": ("classes", "num_classes"),
    "Multilabel": ("labels", "num_labels"),
}


def metric_name(kind: str) -> str:
    """The name of a torchmetrics class in reports: MulticlassF1Score is f1_score."""
    plain = re.sub(r"^(Binary|Multiclass|Multilabel)(?=.)", "", kind)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", plain).lower()


def chosen(given: Any, known: Sequence[str]) -> tuple[list[str], dict[str, Metric]]:
    """What `metrics` asks for: names of `known`, and torchmetrics by name.

    Raises:
        ArgumentError: an unknown name, two of one name, or what is neither a name nor a torchmetric.
    """
    if isinstance(given, (str, Metric)) or not isinstance(given, (Mapping, Sequence)):
        raise ArgumentError(f"metrics={named(given)}: expected a list of names and torchmetrics, or these by name.")
    pairs: Iterable[tuple[str, Any]] = (
        given.items()
        if isinstance(given, Mapping)
        else ((item if isinstance(item, str) else metric_name(type(item).__name__), item) for item in given)
    )
    sums: list[str] = []
    objects: dict[str, Metric] = {}
    for name, item in pairs:
        if name in sums or name in objects or name == "loss":
            way = (
                "the loss is always reported"
                if name == "loss"
                else "name them, as in task.metrics={mine: ..., other: ...}"
            )
            raise ArgumentError(f"metrics: two are called {name}; {way}.")
        if isinstance(item, str):
            if item not in known:
                raise ArgumentError(
                    f"metrics={item}: the task has no such metric; {did_you_mean(item, known)}; others are "
                    "torchmetrics, by _target_."
                )
            if item != name:
                raise ArgumentError(f"metrics.{name}={item}: a metric of the task's own keeps its name; say {item}.")
            sums.append(item)
            continue
        if not isinstance(item, Metric) or isinstance(item, BaseAggregator):
            raise ArgumentError(
                f"metrics.{name}={named(item)}: expected a torchmetric of predictions and targets, such as "
                "torchmetrics.classification.MulticlassAUROC."
            )
        if not re.fullmatch(r"\w+", name):
            raise ArgumentError(f"metrics.{name}: a metric's name has letters, digits and underscores.")
        objects[name] = item
    return sums, objects


class Meters(nn.Module):
    """Torchmetrics by name, for each split its own. They move with the task, keep their number format, and leave
    nothing in its `state_dict`: a checkpoint keeps what is under way with the other metrics, for each rank."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        super().__init__()
        self.names = tuple(metrics)
        # a metric of two classes takes the probability of the second
        self._binary = [type(metric).__name__.startswith("Binary") for metric in metrics.values()]
        for split in SPLITS:
            self.add_module(f"{split}_metrics", nn.ModuleList(_own(metric) for metric in metrics.values()))

    def _apply(self, fn: Any, recurse: bool = True) -> "Meters":
        device = fn(torch.empty(0, dtype=torch.int64)).device  # integers are moved, and never converted
        for split in SPLITS:
            for metric in self._of(split):
                metric._apply(lambda tensor: tensor.to(device))
        return self

    def _of(self, split: str) -> Any:
        return getattr(self, f"{split}_metrics")

    def fresh(self) -> "Meters":
        """The same metrics, on the same device, that have seen nothing."""
        return Meters(dict(zip(self.names, self._of("train"), strict=True)))

    @torch.no_grad()
    def update(self, split: str, predictions: Tensor, targets: Tensor) -> None:
        """Adds a batch, whose rows all count.

        Raises:
            UserError: a metric does not take it.
        """
        if not len(targets):
            return
        for name, metric, binary in zip(self.names, self._of(split), self._binary, strict=True):
            second = binary and predictions.dim() == 2 and predictions.shape[1] == 2 and targets.dim() == 1
            given = predictions[:, 1] if second else predictions
            try:
                metric.update(given, targets)
            except torch.OutOfMemoryError:
                raise
            except CALL as error:
                raise UserError(
                    f"task.metrics.{name}: {named(metric)} does not take predictions {shape(given)} and targets "
                    f"{shape(targets)}: {' '.join(str(error).split())[:300]}{user_location(error)}"
                ) from error

    @torch.no_grad()
    def take(self, split: str, trainer: Trainer | None = None) -> dict[str, float]:
        """The metrics of a split over all of the trainer's processes, and nothing where there were no samples; resets
        them. A collective.

        Raises:
            UserError: a metric can't be computed, or is no scalar.
        """
        metrics = self._of(split)
        if trainer is not None and trainer.world_size > 1:
            _merge(metrics, trainer)
        found = {}
        for name, metric in zip(self.names, metrics, strict=True):
            if metric.update_count:
                found[name] = _value(name, metric)
            metric.reset()
        return found

    def check_kinds(self, predicts: str, width: int) -> None:
        """Raises UserError where torchmetrics are of another kind of answers than the task's: `predicts` `width` of."""
        metrics = zip(self.names, self._of("train"), strict=True)
        refuse(words for name, metric in metrics if (words := _unfit(name, metric, predicts, width)))

    def check(self, predictions: Tensor, targets: Tensor) -> None:
        """Tries the metrics on predictions and targets like the task's.

        Raises:
            UserError: one does not take them, or gives no scalar.
        """
        trial = self.fresh()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it says of these samples
            trial.update("val", predictions, targets)
            trial.take("val")


def _own(metric: Metric) -> Metric:
    clone = metric.clone()
    clone.reset()
    for module in clone.modules():
        module._non_persistent_buffers_set.update(module._buffers)
        if isinstance(module, Metric):
            module.persistent(False)
            module.sync_on_compute = False  # `_merge` has seen to it
    return clone


def _unfit(name: str, metric: Metric, predicts: str, width: int) -> str | None:
    """The sentence about a torchmetric whose name or size says that it is of other answers."""
    kind = type(metric).__name__
    form = next((form for form in FORMS if kind.startswith(form) and kind != form), None)
    if form is None or not type(metric).__module__.startswith("torchmetrics."):
        return None
    what, size = FORMS[form]
    own = getattr(metric, size, None) if size else None
    many = "" if own is None else f"{own} "
    told = f"task.metrics.{name}: {kind} is of {many}{what}, and the task predicts {width} {predicts}"
    if predicts == "values":
        return f"{told}: take a metric of values, such as torchmetrics.MeanAbsoluteError."
    fits = {"classes": "Multiclass", "labels": "Multilabel"}.get(predicts)
    if fits is None or (form == "Binary" and (predicts == "labels" or width == 2)):
        return None
    if form == fits:
        return None if own in (width, None) else f"{told}: set {size}: {width}."
    return f"{told}: take torchmetrics.classification.{fits}{kind.removeprefix(form)}, with {FORMS[fits][1]}: {width}."


def _value(name: str, metric: Metric) -> float:
    try:
        value = metric.compute()
    except CALL as error:
        raise UserError(
            f"task.metrics.{name}: {named(metric)} can't be computed: {' '.join(str(error).split())[:300]}"
            f"{user_location(error)}"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"a tensor {shape(value)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        way = ", such as average=macro gives" if hasattr(metric, "average") else ""
        raise UserError(f"task.metrics.{name}: {named(metric)} gives {what}: expected a scalar{way}.")
    return float(value)


def _merge(metrics: Sequence[Metric], trainer: Trainer) -> None:
    """Puts the states of all processes together in each, in the order of ranks. Those that share a replica's samples,
    as tensor ranks do, count once, and those that see no outputs, as all stages of a pipeline but the last, not at all.
    """
    sharing = trainer.distributed_sampler_kwargs
    replica = sharing["rank"] if sharing else trainer.global_rank
    mine = [[ranks.metric_state(part) for part in _parts(metric)] for metric in metrics]
    each = ranks.gathered((replica, mine), trainer)
    for number, metric in enumerate(metrics):
        rows: dict[int, list[dict[str, Any]]] = {}
        for its, states in each:
            if states[number][0]["count"]:
                rows.setdefault(its, states[number])
        for part, states in zip(_parts(metric), zip(*rows.values(), strict=True), strict=bool(rows)):
            ranks.load_metric_state(part, states[0] if len(states) == 1 else _together(part, states))


def _parts(metric: Metric) -> list[Metric]:
    """A metric and those within it."""
    return [module for module in metric.modules() if isinstance(module, Metric)]


def _together(metric: Metric, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    reductions: dict[str, Any] = dict(metric._reductions)
    for name, reduction in reductions.items():
        found = [state["values"][name] for state in states]
        if isinstance(found[0], list):
            values[name] = [part for parts in found for part in parts]
        else:
            stacked = torch.stack(found)
            values[name] = stacked if reduction is None else reduction(stacked)
    return {"count": sum(state["count"] for state in states), "values": values}
