"""Relational distillation: distances and angles of embeddings `[batch, features]`, and contrast.

Student and teacher may have different sizes. `rows` `[batch]` are weights of the samples.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lathe.compression.distillation.losses import mean


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
        found = F.smooth_l1_loss(_distances(ours, pairs), _distances(theirs, pairs), reduction="none")
        loss = loss + distance_weight * _mean(found, pairs)
    if angle_weight:
        found = F.smooth_l1_loss(_angles(ours), _angles(theirs), reduction="none")
        triples = None if pairs is None or rows is None else pairs[None] * rows[:, None, None]
        loss = loss + angle_weight * _mean(found, triples)
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


def _mean(values: Tensor, weights: Tensor | None) -> Tensor:
    return values.mean() if weights is None else (values * weights).sum() / weights.sum().clamp(min=1)


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
    negatives, classes = teacher, labels
    own = torch.eye(len(student), dtype=torch.bool, device=student.device)
    logits = student @ negatives.T / temperature
    same = own if classes is None or labels is None else own | (labels[:, None] == classes[None, :])
    logits = logits.masked_fill(same, -1e9)
    if queue is not None:
        earlier = student @ queue.embeddings.T / temperature
        absent = queue.labels[None, :] == -1
        if labels is not None:
            absent = absent | (labels[:, None] == queue.labels[None, :])
        logits = torch.cat((logits, earlier.masked_fill(absent, -1e9)), dim=1)
    every = torch.cat((positive, logits), dim=1)
    return mean(every.logsumexp(1) - positive[:, 0], rows)


def _flat(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x.flatten(1).to(dtype or torch.promote_types(x.dtype, torch.float32))
