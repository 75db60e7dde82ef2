"""The soft loss terms of a student and one teacher."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lathe.callbacks.methods.distill_layers import KEY, Capture, Probe, pairs_of
from lathe.compression.distillation.features import attention, connector, hint
from lathe.compression.distillation.losses import dist, dkd, kd
from lathe.compression.distillation.relations import Projections, Queue, crd, rkd
from lathe.data.order import IGNORE
from lathe.errors import ArgumentError, UserError
from lathe.measure.processes import everyones_tensors, processes

# Factor of each method's term: 1 in DKD's and DIST's papers, the CRD repository's for the others.
WEIGHTS = {"kd": 1.0, "dkd": 1.0, "dist": 1.0, "fitnets": 100.0, "attention": 1000.0, "rkd": 1.0, "crd": 0.8}
FEATURES = ("fitnets", "attention", "rkd", "crd")


@dataclass(frozen=True)
class Settings:
    """Options of the methods; `weights` by method."""

    weights: dict[str, float]
    temperature: float
    target_weight: float
    other_weight: float
    between_weight: float
    within_weight: float
    distance_weight: float
    angle_weight: float
    crd_features: int
    crd_queue: int
    crd_temperature: float
    student_layers: Any
    teacher_layers: Any


def weights_of(method: Any, weight: Any) -> dict[str, float]:
    """Return the weights by method, from names (joined by +, or a list) and a number, a mapping or None."""
    names = method.split("+") if isinstance(method, str) else list(method)
    if len(set(names)) != len(names):
        raise ArgumentError(f"method={method}: name one method or several different ones of {', '.join(WEIGHTS)}.")
    given = dict(weight) if isinstance(weight, Mapping) else dict.fromkeys(names, weight) if weight is not None else {}
    if not set(given) <= set(names):
        raise ArgumentError(
            f"weight={weight}: give a number above 0, one for each of {', '.join(names)} as {{kd: 1.0}}, or null."
        )
    return {name: float(given.get(name, WEIGHTS[name])) for name in names}


@dataclass(frozen=True)
class Counted:
    """Rows of the outputs that count.

    `target` is int64 [rows] or probabilities [rows, classes], `rows` are their weights (None: all count), and `count`
    divides their sums (None: the sum of `rows`).
    """

    target: Tensor | None
    rows: Tensor | None
    count: Tensor | None


def counted(outputs: Tensor, batch: Any) -> Counted:
    """Read a batch as tasks do: `(x, y)` or `(x, y, count)`; rows with the target -100 are padding."""
    target = batch[1] if isinstance(batch, list | tuple) and len(batch) > 1 and isinstance(batch[1], Tensor) else None
    if target is None or target.shape[: outputs.dim() - 1] != outputs.shape[:-1]:
        return Counted(None, None, None)
    if target.is_floating_point():
        return Counted(target.flatten(0, -2), None, None)
    flat = target.flatten()
    return Counted(flat, flat != IGNORE, batch[2] if len(batch) > 2 else None)


class Comparison:
    """Terms of one teacher, with connectors and `crd`'s queue: equal on all ranks, in neither net."""

    def __init__(
        self, settings: Settings, student: Probe, teacher: Probe, nets: tuple[nn.Module, nn.Module], seed: int
    ) -> None:
        self.settings = settings
        self.pairs: dict[str, list[tuple[str, str]]] = {}
        self.channels: dict[str, int] = {}  # of the student's layers, in the unsharded net
        self.connectors = nn.ModuleDict()
        self.queue: Queue | None = None
        self._pending: tuple[Tensor, Tensor] | None = None  # pushed to the queue after the backward pass
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for method in settings.weights:
                if method not in FEATURES:
                    continue
                patterns = (settings.student_layers, settings.teacher_layers)
                pairs = self.pairs[method] = pairs_of(method, student, teacher, nets, patterns)
                for index, (ours, theirs) in enumerate(pairs):
                    shapes = student.shapes[ours], teacher.shapes[theirs]
                    self.channels[ours] = _channels(shapes[0])
                    if method == "fitnets":
                        self.connectors[f"fitnets_{index}"] = connector(*shapes)
                    if method == "crd":
                        mine, other = (torch.Size(shape).numel() for shape in shapes)
                        self.connectors[f"crd_{index}"] = Projections(mine, other, settings.crd_features)
        if "crd" in self.pairs:
            if len(self.pairs["crd"]) != 1:
                raise UserError(
                    f"{KEY}.student_layers: crd compares one embedding, and {len(self.pairs['crd'])} layers are "
                    "named: name one."
                )
            if settings.crd_queue:
                self.queue = Queue(settings.crd_queue, settings.crd_features)

    def to(self, device: torch.device) -> None:
        self.connectors.to(device)
        if self.queue is not None:
            self.queue.embeddings, self.queue.labels = self.queue.embeddings.to(device), self.queue.labels.to(device)

    def __call__(
        self, outputs: Tensor, logits: Tensor, ours: Capture | None, theirs: Capture | None, which: Counted
    ) -> Tensor:
        """Return the weighted sum of the terms: 0-dim, in at least float32. Call without autocast."""
        terms = [
            weight * self._term(name, outputs, logits, ours, theirs, which)
            for name, weight in self.settings.weights.items()
        ]
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum()

    def _term(
        self, method: str, outputs: Tensor, logits: Tensor, ours: Capture | None, theirs: Capture | None, which: Counted
    ) -> Tensor:
        s, rows, count = self.settings, which.rows, which.count
        if method == "kd":
            return kd(outputs, logits, s.temperature, rows, count)
        if method == "dkd":
            if which.target is None:
                raise UserError(
                    f"{KEY}.method=dkd needs a target for each row of logits, which this task's batches lack: use kd."
                )
            return dkd(outputs, logits, which.target, s.temperature, s.target_weight, s.other_weight, rows, count)
        if method == "dist":
            return dist(outputs, logits, s.temperature, s.between_weight, s.within_weight, rows)
        assert ours is not None
        assert theirs is not None
        terms = []
        for index, (mine, other) in enumerate(self.pairs[method]):
            features = ours.take(mine)
            if _channels(features.shape[1:]) != self.channels[mine]:
                raise UserError(
                    f"{KEY}: {mine} gives {_channels(features.shape[1:])} channels where the whole net has "
                    f"{self.channels[mine]}, since "
                    f"the strategy or another method has cut it: {method} can't compare it, use method=kd, dkd or dist."
                )
            terms.append(self._feature(method, index, features, theirs.take(other), which))
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum()

    def _feature(self, method: str, index: int, ours: Tensor, theirs: Tensor, which: Counted) -> Tensor:
        s, rows = self.settings, which.rows
        if method == "fitnets":
            link = self.connectors[f"fitnets_{index}"]
            weight: Any = link.weight
            if rows is not None and ours.dim() == 3 and len(rows) == len(ours):
                rows = rows.repeat_interleave(ours.shape[1])
            return hint(link(ours.to(weight.dtype)), theirs, rows)
        if method == "attention":
            return attention(ours, theirs, rows)
        if method == "rkd":
            return rkd(ours, theirs, s.distance_weight, s.angle_weight, rows)
        self.flush()
        mine, other = self.connectors[f"crd_{index}"](ours, theirs)
        hard = None if which.target is None or which.target.is_floating_point() else which.target
        loss = crd(mine, other, hard, self.queue, s.crd_temperature, rows)
        if self.queue is not None:
            self._pending = _everyones(other, hard)
        return loss

    def flush(self) -> None:
        """Push the last batch's embeddings; the backward pass needs the queue before that."""
        if self.queue is not None and self._pending is not None:
            self.queue.push(*self._pending)
            self._pending = None

    def state_dict(self) -> dict[str, Any]:
        self.flush()
        state: dict[str, Any] = {"connectors": {k: v.detach().clone() for k, v in self.connectors.state_dict().items()}}
        if self.queue is not None:
            state |= {
                "queue": self.queue.embeddings.clone(),
                "labels": self.queue.labels.clone(),
                "next": self.queue.next,
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            self.connectors.load_state_dict(state["connectors"])
        except RuntimeError as error:
            raise UserError(
                f"{KEY}: the checkpoint's connectors are for other layers or another method: use those of its run."
            ) from error
        if self.queue is not None and "queue" in state:
            self.queue.embeddings.copy_(state["queue"])
            self.queue.labels.copy_(state["labels"])
            self.queue.next = state["next"]


def _channels(shape: tuple[int, ...]) -> int:
    """Return the channels of a feature shape without the batch: the first of three sizes, else the last."""
    return shape[0] if len(shape) == 3 else shape[-1]


def _everyones(embeddings: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return all ranks' embeddings and labels in the order of ranks, so that queues are equal."""
    embeddings = embeddings.detach().contiguous()
    labels = torch.full((len(embeddings),), -2, device=embeddings.device) if labels is None else labels.contiguous()
    if processes() > 1:
        embeddings, labels = torch.cat(everyones_tensors(embeddings)), torch.cat(everyones_tensors(labels))
    return embeddings, torch.where(labels == IGNORE, -1, labels)  # a padding row counts as an empty place
