"""Logit losses against the formulas of their papers, written out anew."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lathe.compression.distillation import dist, dkd, kd


def some(rows: int = 6, classes: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student = (3 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)).requires_grad_()
    teacher = 3 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    return student, teacher, torch.randint(classes, (rows,), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_kd_is_the_divergence_times_the_squared_temperature(temperature: float) -> None:
    student, teacher, _ = some()
    p, q = (teacher / temperature).softmax(1), (student / temperature).softmax(1)
    expected = temperature**2 * (p * (p.log() - q.log())).sum(1).mean()
    torch.testing.assert_close(kd(student, teacher, temperature), expected)


def test_kd_of_equal_nets_is_zero_and_pulls_nowhere() -> None:
    student, _, _ = some()
    loss = kd(student, student.detach())
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-12)
    assert student.grad is not None
    assert student.grad.abs().max() < 1e-12


def test_kd_s_gradient_keeps_its_size_as_the_temperature_rises() -> None:
    """Hinton's limit: for high T the loss is half the squared difference of centred logits, divided by the classes."""
    student, teacher, _ = some()
    difference = (student - student.mean(1, keepdim=True)) - (teacher - teacher.mean(1, keepdim=True))
    torch.testing.assert_close(kd(student, teacher, 1e4), difference.square().sum(1).mean() / 2 / 5, rtol=1e-3, atol=0)


def test_dkd_with_the_weights_of_its_decoupling_is_kd() -> None:
    """Zhao 2022, equation 7: KD = TCKD + (1 - p_target) NCKD, row by row."""
    student, teacher, target = some(rows=1)
    p = (teacher / 4).softmax(1)[0, target[0]].item()
    torch.testing.assert_close(dkd(student, teacher, target, 4.0, 1.0, 1 - p), kd(student, teacher, 4.0))


def test_dkd_is_the_published_formula() -> None:
    student, teacher, target = some()
    hit = F.one_hot(target, 5).bool()
    p, q = (teacher / 4).softmax(1), (student / 4).softmax(1)
    both = [torch.stack((x[hit], 1 - x[hit]), 1) for x in (p, q)]
    rest = [x[~hit].view(6, 4) / (1 - x[hit])[:, None] for x in (p, q)]
    divergence = [(a * (a / b).log()).sum(1).mean() for a, b in (both, rest)]
    torch.testing.assert_close(dkd(student, teacher, target), 16 * (divergence[0] + 8 * divergence[1]))
    soft = F.one_hot(target, 5).double() * 0.6 + 0.08
    torch.testing.assert_close(dkd(student, teacher, soft), dkd(student, teacher, target))


def test_dkd_is_finite_for_a_teacher_without_doubt() -> None:
    student, teacher, target = some()
    loss = dkd(student.float(), (teacher + 1e4 * F.one_hot(target, 5)).float(), target)
    loss.backward()
    assert torch.isfinite(loss)
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()


def test_dist_is_one_minus_the_correlations() -> None:
    student, teacher, _ = some()
    p, q = teacher.softmax(1), student.softmax(1)
    between = torch.stack([1 - torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(p, q, strict=True)]).mean()
    within = torch.stack([1 - torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(p.T, q.T, strict=True)]).mean()
    torch.testing.assert_close(dist(student, teacher, 1.0, 2.0, 3.0), 2 * between + 3 * within)


@pytest.mark.parametrize("name", ["kd", "dkd", "dist"])
def test_rows_that_do_not_count_change_nothing(name: str) -> None:
    student, teacher, target = some()

    def loss(s: Tensor, t: Tensor, y: Tensor, rows: Tensor | None) -> Tensor:
        return dkd(s, t, y, rows=rows) if name == "dkd" else {"kd": kd, "dist": dist}[name](s, t, rows=rows)

    filled = [torch.cat((x, 100 + x[:2])) for x in (student, teacher)]
    labels = torch.cat((target, torch.tensor([-100, -100])))
    torch.testing.assert_close(loss(*filled, labels, labels != -100), loss(student, teacher, target, None))
    nothing = loss(student, teacher, torch.full_like(target, -100), torch.zeros(6, dtype=torch.bool))
    assert torch.isfinite(nothing)


def test_tokens_are_rows_and_a_global_count_divides() -> None:
    student, teacher, _ = some()
    cube = [x.view(2, 3, 5) for x in (student, teacher)]
    torch.testing.assert_close(kd(*cube), kd(student, teacher))
    torch.testing.assert_close(kd(*cube, count=torch.tensor(12.0)), kd(student, teacher) / 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_logits_are_compared_in_float32(dtype: torch.dtype) -> None:
    student, teacher, target = some()
    for loss in (kd(student.to(dtype), teacher.to(dtype)), dkd(student.to(dtype), teacher.to(dtype), target)):
        assert loss.dtype == torch.float32
