"""Logit distillation: Hinton's loss, its decoupled form (DKD) and DIST.

Every loss takes logits `[..., classes]` of student and teacher, computes in at least float32, and is a mean over rows
(samples or tokens). `rows` `[rows]` are weights, 0 for padding; the weighted sum is divided by `count`, 0-dim, by
default `rows.sum()`. The teacher gets no gradient.
"""

import torch
from torch import Tensor
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
