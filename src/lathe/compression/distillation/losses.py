"""Distillation losses: of logits (kd, dkd, dist), features (hint, attention) and relations of samples (rkd, crd).

Every loss computes in at least float32 and is a mean over rows (samples or tokens). `rows` `[rows]` are weights, 0 for
padding; the weighted sum is divided by `count`, 0-dim, by default `rows.sum()`. The teacher gets no gradient.

Logits are `[..., classes]`; features `[batch, channels, height, width]`, `[batch, time, channels]` or `[batch,
channels]`; embeddings `[batch, features]`, of which student and teacher may have different numbers.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
        found = F.smooth_l1_loss(_distances(ours, pairs), _distances(theirs, pairs), reduction="none")
        loss = loss + distance_weight * mean(found, pairs)
    if angle_weight:
        found = F.smooth_l1_loss(_angles(ours), _angles(theirs), reduction="none")
        triples = None if pairs is None or rows is None else pairs[None] * rows[:, None, None]
        loss = loss + angle_weight * mean(found, triples)
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
    every = torch.cat((positive, logits), dim=1)
    return mean(every.logsumexp(1) - positive[:, 0], rows)


def _flat(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x.flatten(1).to(dtype or torch.promote_types(x.dtype, torch.float32))
