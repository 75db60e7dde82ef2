"""What a student's logits are told by a teacher's: Hinton's distillation, and its decoupled and relational forms.

Every loss takes logits `[..., classes]` of student and teacher, computes in at least float32, and is a mean over rows,
a row being one distribution: a sample, or a token. `rows` `[rows]` are weights, 0 for a row that does not count; their
sum is divided by `count`, a 0-dim tensor, which is `rows.sum()` unless a count over several devices is given. The
teacher's side gets no gradient.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def kd(
    student: Tensor, teacher: Tensor, temperature: float = 4.0, rows: Tensor | None = None, count: Tensor | None = None
) -> Tensor:
    """`T^2 KL(softmax(teacher / T) || softmax(student / T))`, in nats: Hinton et al. 2015, arXiv:1503.02531. The factor
    keeps the gradient's size as `temperature` changes."""
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
    """Decoupled distillation: Zhao et al. 2022, arXiv:2203.08679, whose alpha is `target_weight` and whose beta is
    `other_weight`.

    Hinton's loss is a sum of two: how sure the teacher is of the target class, and how it shares the rest among the
    others. The second is weighed there by how unsure the teacher is; here by a constant.

    Args:
        target: int64 [...], the class of each row; or class probabilities [..., classes], of which the largest is
            taken. Where `rows` is 0, any number will do.
    """
    ours, theirs = _softened(student, teacher, temperature)
    classes = target.argmax(-1) if target.is_floating_point() else target
    index = classes.reshape(-1, 1).clamp(min=0)
    hit = torch.zeros_like(ours, dtype=torch.bool).scatter_(1, index, True)
    target_term = _divergence(_binary(ours, hit, index), _binary(theirs, hit, index))
    # Far below every logit and yet finite: 0 * (-inf - -inf) would be NaN.
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
    """Relations instead of values: Huang et al. 2022, arXiv:2205.10536, whose beta is `between_weight` and whose gamma
    is `within_weight`.

    `T^2` times 1 minus Pearson's correlation of the two nets' probabilities: over the classes of each row (between
    classes), and over the rows of each class (within a class). A strong teacher may be sharper than the student can be;
    their correlation does not mind.
    """
    ours, theirs = (log_p.exp() for log_p in _softened(student, teacher, temperature))
    weights = torch.ones(len(ours), dtype=ours.dtype, device=ours.device) if rows is None else rows.to(ours.dtype)
    even = torch.ones_like(ours[:1])
    between = mean(1 - correlation(ours, theirs, even), rows)
    within = (1 - correlation(ours.T, theirs.T, weights[None])).mean()
    return temperature**2 * (between_weight * between + within_weight * within)


def correlation(x: Tensor, y: Tensor, weights: Tensor, eps: float = 1e-8) -> Tensor:
    """Pearson's correlation of each row of `x` with that of `y`, both [rows, n], over places that weigh `weights` [1,
    n]: [rows].
    """
    total = weights.sum(-1, keepdim=True).clamp(min=1)
    x = (x - (weights * x).sum(-1, keepdim=True) / total) * weights.sqrt()
    y = (y - (weights * y).sum(-1, keepdim=True) / total) * weights.sqrt()
    return F.cosine_similarity(x, y, dim=-1, eps=eps)


def mean(values: Tensor, rows: Tensor | None, count: Tensor | None = None) -> Tensor:
    """The weighted mean of `values` [rows]; 0 where no row counts."""
    if rows is None:
        return values.mean() if count is None else values.sum() / count
    total = (values * rows.to(values.dtype)).sum()
    return total / (rows.sum().clamp(min=1) if count is None else count)


def _softened(student: Tensor, teacher: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities [rows, classes] at a temperature."""
    dtype = torch.promote_types(student.dtype, torch.float32)
    ours, theirs = (logits.flatten(0, -2).to(dtype) / temperature for logits in (student, teacher.detach()))
    return F.log_softmax(ours, dim=-1), F.log_softmax(theirs, dim=-1)


def _divergence(ours: Tensor, theirs: Tensor) -> Tensor:
    """KL(theirs || ours) of each row of log-probabilities."""
    return F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)


def _binary(log_p: Tensor, hit: Tensor, index: Tensor) -> Tensor:
    """The log-probabilities of the target and of all others together, [rows, 2], without the cancellation in log(1 -
    p).
    """
    rest = log_p.masked_fill(hit, -1e9).logsumexp(-1, keepdim=True)
    return torch.cat((log_p.gather(1, index), rest), dim=1)
