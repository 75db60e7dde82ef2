"""Feature distillation: hints and attention maps.

Features are `[batch, channels, height, width]`, `[batch, time, channels]` or `[batch, channels]`. `rows` are weights of
the samples `[batch]` or tokens `[batch * time]`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lathe.compression.distillation.losses import mean

Shape = tuple[int, ...]


def connector(student: Shape, teacher: Shape) -> nn.Module:
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
