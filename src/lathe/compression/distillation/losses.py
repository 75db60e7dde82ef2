"""Distillation losses: of logits (kd, dkd, dist), features (hint, attention) and relations of samples (rkd, crd).

`Comparison` computes the chosen ones for a teacher, from features that `Capture` takes of the layers of both nets.

Every loss computes in at least float32 and is a mean over rows (samples or tokens). `rows` `[rows]` are weights, 0 for
padding; the weighted sum is divided by `count`, 0-dim, by default `rows.sum()`. The teacher gets no gradient.

Logits are `[..., classes]`; features `[batch, channels, height, width]`, `[batch, time, channels]` or `[batch,
channels]`; embeddings `[batch, features]`, of which student and teacher may have different numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from lathe.compression.modes import evaluated
from lathe.errors import UserError, require
from lathe.measure.calls import Call, output_of, run
from lathe.measure.processes import everyones_tensors, processes

KEY = "compression.distill"
# Factor of each method's term: 1 in DKD's and DIST's papers, the CRD repository's for the others.
WEIGHTS = {"kd": 1.0, "dkd": 1.0, "dist": 1.0, "fitnets": 100.0, "attention": 1000.0, "rkd": 1.0, "crd": 0.8}
FEATURES = ("fitnets", "attention", "rkd", "crd")  # methods that compare layers
Shape = tuple[int, ...]
Counted = tuple[Tensor | None, Tensor | None, Tensor | None]  # as `counted_rows` returns


def kd(
    student: Tensor, teacher: Tensor, temperature: float = 4.0, rows: Tensor | None = None, count: Tensor | None = None
) -> Tensor:
    """Return `T^2 KL(softmax(teacher / T) || softmax(student / T))`, in nats.

    Hinton et al. 2015, arXiv:1503.02531. The factor keeps the gradient's size as `temperature` changes.
    """
    ours, theirs = _softened(student, teacher, temperature)
    return temperature**2 * mean(_divergence(ours, theirs), rows, count)


def dkd(
    student: Tensor,
    teacher: Tensor,
    target: Tensor,
    temperature: float = 4.0,
    target_weight: float = 1.0,
    other_weight: float = 8.0,
    rows: Tensor | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """Return the decoupled loss; `target_weight` and `other_weight` are the paper's alpha and beta.

    Zhao et al. 2022, arXiv:2203.08679. Hinton's loss is a sum of a term of the target's probability, and one of the
    distribution of the others, weighted by the teacher's uncertainty; here the weight is constant. `target` is int64
    [...], or probabilities [..., classes]: the largest counts; any number if `rows` is 0.
    """
    ours, theirs = _softened(student, teacher, temperature)
    classes = target.argmax(-1) if target.is_floating_point() else target
    index = classes.reshape(-1, 1).clamp(min=0)
    hit = torch.zeros_like(ours, dtype=torch.bool).scatter_(1, index, True)
    target_term = _divergence(_binary(ours, hit, index), _binary(theirs, hit, index))
    # finite: 0 * (-inf - -inf) would be NaN
    others = [F.log_softmax(log_p.masked_fill(hit, -1e9), dim=-1) for log_p in (ours, theirs)]
    other_term = _divergence(*others)
    return temperature**2 * mean(target_weight * target_term + other_weight * other_term, rows, count)


def dist(
    student: Tensor,
    teacher: Tensor,
    temperature: float = 1.0,
    between_weight: float = 1.0,
    within_weight: float = 1.0,
    rows: Tensor | None = None,
) -> Tensor:
    """Return DIST's loss; `between_weight` and `within_weight` are the paper's beta and gamma.

    Huang et al. 2022, arXiv:2205.10536. `T^2` times 1 minus Pearson's correlation of the two nets' probabilities, over
    the classes of each row and over the rows of each class.
    """
    ours, theirs = (log_p.exp() for log_p in _softened(student, teacher, temperature))
    weights = torch.ones(len(ours), dtype=ours.dtype, device=ours.device) if rows is None else rows.to(ours.dtype)
    even = torch.ones_like(ours[:1])
    between = mean(1 - correlation(ours, theirs, even), rows)
    within = (1 - correlation(ours.T, theirs.T, weights[None])).mean()
    return temperature**2 * (between_weight * between + within_weight * within)


def correlation(x: Tensor, y: Tensor, weights: Tensor, eps: float = 1e-8) -> Tensor:
    """Return the correlation of the rows of `x` and `y` [rows, n], weighted by `weights` [1, n]: [rows]."""
    total = weights.sum(-1, keepdim=True).clamp(min=1)
    x = (x - (weights * x).sum(-1, keepdim=True) / total) * weights.sqrt()
    y = (y - (weights * y).sum(-1, keepdim=True) / total) * weights.sqrt()
    return F.cosine_similarity(x, y, dim=-1, eps=eps)


def mean(values: Tensor, rows: Tensor | None, count: Tensor | None = None) -> Tensor:
    """Return the weighted mean of `values` [rows]; 0 if all weights are."""
    if rows is None:
        return values.mean() if count is None else values.sum() / count
    total = (values * rows.to(values.dtype)).sum()
    return total / (rows.sum().clamp(min=1) if count is None else count)


def _softened(student: Tensor, teacher: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [rows, classes] at a temperature."""
    dtype = torch.promote_types(student.dtype, torch.float32)
    ours, theirs = (logits.flatten(0, -2).to(dtype) / temperature for logits in (student, teacher.detach()))
    return F.log_softmax(ours, dim=-1), F.log_softmax(theirs, dim=-1)


def _divergence(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return KL(theirs || ours) of each row of log-probabilities."""
    return F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)


def _binary(log_p: Tensor, hit: Tensor, index: Tensor) -> Tensor:
    """Return log-probabilities of the target and the rest, [rows, 2], without cancellation in log(1 - p)."""
    rest = log_p.masked_fill(hit, -1e9).logsumexp(-1, keepdim=True)
    return torch.cat((log_p.gather(1, index), rest), dim=1)


def connector(student: tuple[int, ...], teacher: tuple[int, ...]) -> nn.Module:
    """Return a trainable map from the student's to the teacher's feature shape, without the batch."""
    if len(student) == 3:
        return nn.Conv2d(student[0], teacher[0], kernel_size=1)
    return nn.Linear(student[-1], teacher[-1])


def hint(student: Tensor, teacher: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return the mean squared error of equal shapes (FitNets, Romero et al. 2015, arXiv:1412.6550).

    The paper trains on hints before the task; here, as usual since, they are a term of the loss.
    """
    ours, theirs = _wide(student), _wide(teacher.detach())
    squares = (ours - theirs).square()
    per_row = squares.mean(-1).flatten() if squares.dim() == 3 else squares.flatten(1).mean(1)
    return mean(per_row, rows)


def attention_map(features: Tensor) -> Tensor:
    """Return the mean square over channels, as unit vectors `[batch, height * width]`."""
    return F.normalize(_wide(features).square().mean(1).flatten(1), dim=1)


def attention(student: Tensor, teacher: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return the mean squared error of attention maps (Zagoruyko and Komodakis 2017, arXiv:1612.03928).

    Channels may differ; the larger map is averaged down. The mean over positions is the CRD repository's.
    """
    size = (min(student.shape[2], teacher.shape[2]), min(student.shape[3], teacher.shape[3]))
    if student.shape[2:] != size:
        student = F.adaptive_avg_pool2d(student, size)
    if teacher.shape[2:] != size:
        teacher = F.adaptive_avg_pool2d(teacher, size)
    return mean((attention_map(student) - attention_map(teacher.detach())).square().mean(1), rows)


def _wide(features: Tensor) -> Tensor:
    return features.to(torch.promote_types(features.dtype, torch.float32))


def rkd(
    student: Tensor,
    teacher: Tensor,
    distance_weight: float = 25.0,
    angle_weight: float = 50.0,
    rows: Tensor | None = None,
) -> Tensor:
    """Return RKD's loss (Park et al. 2019, arXiv:1904.05068).

    Huber's loss of the distances of each pair of samples, in units of their mean, and of the cosines of each triple's
    angles, `batch^3` numbers.
    """
    ours, theirs = _flat(student), _flat(teacher.detach())
    pairs = None if rows is None else (rows[:, None] * rows[None, :]).to(ours.dtype)
    loss = torch.zeros((), dtype=ours.dtype, device=ours.device)
    if distance_weight:
        errors = F.smooth_l1_loss(_distances(ours, pairs), _distances(theirs, pairs), reduction="none")
        loss = loss + distance_weight * mean(errors, pairs)
    if angle_weight:
        errors = F.smooth_l1_loss(_angles(ours), _angles(theirs), reduction="none")
        triples = None if pairs is None or rows is None else pairs[None] * rows[:, None, None]
        loss = loss + angle_weight * mean(errors, triples)
    return loss


def _distances(x: Tensor, pairs: Tensor | None) -> Tensor:
    """Return distances [batch, batch] over their off-diagonal mean; equal embeddings have gradient 0."""
    distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    own = torch.eye(len(x), dtype=torch.bool, device=x.device)
    others = (~own).to(x.dtype) if pairs is None else pairs.masked_fill(own, 0)
    return distances / ((distances * others).sum() / others.sum().clamp(min=1)).clamp(min=1e-12)


def _angles(x: Tensor) -> Tensor:
    """Return the cosines of the angle at the first index, [batch, batch, batch].

    0 for samples within a thousandth of the mean distance, since a gradient grows as the distance shrinks.
    """
    steps = x[None, :] - x[:, None]
    lengths = steps.detach().norm(dim=2, keepdim=True)
    near = lengths <= 1e-3 * lengths.mean()
    directions = F.normalize(steps.masked_fill(near, 1.0), dim=2).masked_fill(near, 0.0)
    return directions @ directions.mT


class Queue:
    """The newest `size` embeddings of a teacher, with their classes: negatives of `crd`.

    Label -1 is an empty place, -2 a sample without a single class.
    """

    def __init__(self, size: int, features: int, device: torch.device | None = None) -> None:
        self.embeddings = torch.zeros(size, features, device=device)
        self.labels = torch.full((size,), -1, dtype=torch.int64, device=device)
        self.next = 0

    def push(self, embeddings: Tensor, labels: Tensor) -> None:
        """Replace the oldest entries by `embeddings` [n, features] with `labels` [n]."""
        size = len(self.labels)
        embeddings, labels = embeddings.detach()[-size:], labels[-size:]
        first = min(len(labels), size - self.next)
        for part, start in ((slice(0, first), self.next), (slice(first, len(labels)), 0)):
            count = part.stop - part.start
            self.embeddings[start : start + count] = embeddings[part].to(self.embeddings)
            self.labels[start : start + count] = labels[part]
        self.next = (self.next + len(labels)) % size


class Projections(nn.Module):
    """Trainable linear maps of both nets' embeddings to unit vectors of one space."""

    def __init__(self, student: int, teacher: int, features: int) -> None:
        super().__init__()
        self.student = nn.Linear(student, features)
        self.teacher = nn.Linear(teacher, features)

    def forward(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        ours = self.student(_flat(student, self.student.weight.dtype))
        theirs = self.teacher(_flat(teacher.detach(), self.teacher.weight.dtype))
        return F.normalize(ours.float(), dim=1), F.normalize(theirs.float(), dim=1)


def crd(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    queue: Queue | None = None,
    temperature: float = 0.07,
    rows: Tensor | None = None,
) -> Tensor:
    """Return the contrastive loss (Tian et al. 2020, arXiv:1910.10699), in nats.

    A softmax over the teacher's embedding of the same sample and negatives: those of other samples of the batch and of
    the `queue`, but not of the sample's class. InfoNCE replaces the paper's NCE, which draws negatives from a memory of
    the whole training set. `student` and `teacher` are unit vectors [batch, features] of `Projections`; `labels` are
    int64 [batch], None takes every other sample as a negative.
    """
    positive = (student * teacher).sum(1, keepdim=True) / temperature
    logits = student @ teacher.T / temperature
    same = torch.eye(len(student), dtype=torch.bool, device=student.device)
    if labels is not None:
        same = same | (labels[:, None] == labels[None, :])
    logits = logits.masked_fill(same, -1e9)
    if queue is not None:
        earlier = student @ queue.embeddings.T / temperature
        absent = queue.labels[None, :] == -1
        if labels is not None:
            absent = absent | (labels[:, None] == queue.labels[None, :])
        logits = torch.cat((logits, earlier.masked_fill(absent, -1e9)), dim=1)
    candidates = torch.cat((positive, logits), dim=1)
    return mean(candidates.logsumexp(1) - positive[:, 0], rows)


def _flat(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x.flatten(1).to(dtype or torch.promote_types(x.dtype, torch.float32))


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
        probe = cls(net)

        def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and name:
                probe.shapes[name] = tuple(output.shape[1:])
                if isinstance(module, nn.Linear):
                    probe.head, probe.embedding = name, tuple(inputs[0].shape[1:])

        handles = [module.register_forward_hook(partial(look, name)) for name, module in net.named_modules()]
        with evaluated(net, handles), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            outputs = run(net, x)
        output = output_of(outputs)
        require(output is not None, f"{KEY}: {type(net).__name__} returns several tensors, none of them named logits.")
        probe.output = cast(Tensor, output)
        return probe

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


class Capture:
    """Store the outputs of layers of `net` in a forward pass, by name; `<name>.input` is a layer's input.

    Hooks have to be set before a net is compiled, whose graph then returns these tensors too. With `training_only`,
    evaluation stores nothing.
    """

    def __init__(self, net: nn.Module, names: Sequence[str], training_only: bool) -> None:
        self.features: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        features = self.features  # hooks must not refer to this object, which the compiler would trace

        def keep(name: str, module: nn.Module, tensor: Tensor) -> None:
            if module.training or not training_only:
                features[name] = tensor.clone()  # the layer, or the next one, may modify it in place

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
        tensor = self.features.get(name)
        if tensor is None or hasattr(tensor, "device_mesh"):
            why = "is sharded" if tensor is not None else "was not called as a module"
            raise UserError(f"{KEY}: the layer {name} {why}: use strategy=ddp, or method=kd, dkd or dist.")
        return tensor

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.features.clear()


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
    selections: list[list[str]] = []
    for key, patterns, probe in zip(("student_layers", "teacher_layers"), layers, (student, teacher), strict=True):
        if patterns is not None:
            selections.append(probe.match(key, [patterns] if isinstance(patterns, str) else list(patterns)))
        elif method in ("rkd", "crd") and probe.head is not None:
            probe.shapes[f"{probe.head}.input"] = probe.embedding
            selections.append([f"{probe.head}.input"])
        else:
            # the last of each run of `net.blocks` with one output shape
            blocks = [name for name in probe.shapes if name.startswith("blocks.") and name.count(".") == 1]
            after = [*(probe.shapes[name] for name in blocks[1:]), None]
            ends = [name for name, later in zip(blocks, after, strict=True) if probe.shapes[name] != later]
            require(
                bool(ends),
                f"{KEY}.{key}=null: the net names no blocks for {method}; choose among {probe.listed()}.",
            )
            selections.append([ends[len(ends) // 2]] if method == "fitnets" else ends)
    ours, theirs = selections
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


class Comparison:
    """Terms of one teacher, with connectors and `crd`'s queue: equal on all ranks, in neither net."""

    def __init__(self, options: Any, student: Probe, teacher: Probe, seed: int) -> None:
        self.weights, self.losses = options.weights, options.losses
        self.channels: dict[str, int] = {}  # of the student's layers, in the unsharded net
        self.connectors = nn.ModuleDict()
        self.queue: Queue | None = None
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
                        self.connectors[f"fitnets_{index}"] = connector(*shapes)
                    if method == "crd":
                        mine, other = (math.prod(shape) for shape in shapes)
                        self.connectors[f"crd_{index}"] = Projections(mine, other, options.crd_features)
        if "crd" in self.pairs:
            require(len(self.pairs["crd"]) == 1, f"{KEY}.student_layers: crd compares one embedding. Name one layer.")
            self.queue = Queue(options.crd_queue, options.crd_features) if options.crd_queue else None
        names = [theirs for pairs in self.pairs.values() for _, theirs in pairs]
        self.capture = Capture(teacher.net, names, training_only=False) if names else None

    def to(self, device: torch.device) -> None:
        self.connectors.to(device)
        if self.queue is not None:
            self.queue.embeddings, self.queue.labels = self.queue.embeddings.to(device), self.queue.labels.to(device)

    def __call__(self, outputs: Tensor, logits: Tensor, ours: Capture | None, counted: Counted) -> Tensor:
        """Return the weighted sum of the terms: 0-dim, in at least float32. Call without autocast."""
        terms = [weight * self._term(name, outputs, logits, ours, counted) for name, weight in self.weights.items()]
        self.forget()
        return add_terms(terms)

    def forget(self) -> None:
        """Discard the teacher's features of the last forward pass."""
        if self.capture is not None:
            self.capture.features.clear()

    def _term(self, method: str, outputs: Tensor, logits: Tensor, ours: Capture | None, counted: Counted) -> Tensor:
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
            features, theirs = ours.take(mine), self.capture.take(other)
            require(
                _channels(features.shape[1:]) == self.channels[mine],
                f"{KEY}: the strategy or another method has removed channels of {mine}, which {method} can't compare: "
                "use method=kd, dkd or dist.",
            )
            if method == "fitnets":
                link: Any = self.connectors[f"fitnets_{index}"]
                weights = rows
                if rows is not None and features.dim() == 3 and len(rows) == len(features):
                    weights = rows.repeat_interleave(features.shape[1])
                terms.append(loss(link(features.to(link.weight.dtype)), theirs, weights))
            elif method == "crd":
                hard = None if target is None or target.is_floating_point() else target
                terms.append(self._contrast(self.connectors[f"crd_{index}"](features, theirs), hard, rows))
            else:
                terms.append(loss(features, theirs, rows=rows))
        return add_terms(terms)

    def _contrast(self, pair: tuple[Tensor, Tensor], hard: Tensor | None, rows: Tensor | None) -> Tensor:
        """Return `crd`, and keep all ranks' embeddings, in the order of ranks, so that queues are equal."""
        self.flush()
        mine, other = pair
        if self.queue is not None:
            embeddings = other.detach().contiguous()
            # a padding row counts as an empty place, -2 is a sample without a single class
            none = torch.full((len(embeddings),), -2, device=embeddings.device)
            labels = none if hard is None else hard if rows is None else torch.where(rows, hard, -1)
            if processes() > 1:
                embeddings, labels = torch.cat(everyones_tensors(embeddings)), torch.cat(everyones_tensors(labels))
            self._pending = embeddings, labels
        return self.losses["crd"](mine, other, hard, self.queue, rows=rows)

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


def add_terms(terms: list[Tensor]) -> Tensor:
    """Return the sum of 0-dim terms."""
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum()


def _channels(shape: Shape) -> int:
    """Return the channels of a feature shape without the batch: the first of three sizes, else the last."""
    return shape[0] if len(shape) == 3 else shape[-1]
