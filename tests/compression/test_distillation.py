"""Logit losses compared with the formulas of their papers, written out separately."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lathe.compression.distillation import dist, dkd, kd
from lathe.compression.distillation.losses import Queue, attention, attention_map, crd, hint, rkd


def logits() -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [6, 5] of a student and a teacher, and labels."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = 3 * torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
    return student.requires_grad_(), teacher, torch.randint(5, (6,), generator=generator)


def test_kd_is_the_divergence_times_the_squared_temperature() -> None:
    student, teacher, _ = logits()
    p, q = (teacher / 4).softmax(1), (student / 4).softmax(1)
    torch.testing.assert_close(kd(student, teacher, 4.0), 16 * (p * (p.log() - q.log())).sum(1).mean())


def test_dkd_is_the_published_formula() -> None:
    student, teacher, target = logits()
    hit = F.one_hot(target, 5).bool()
    p, q = (teacher / 4).softmax(1), (student / 4).softmax(1)
    both = [torch.stack((x[hit], 1 - x[hit]), 1) for x in (p, q)]
    rest = [x[~hit].view(6, 4) / (1 - x[hit])[:, None] for x in (p, q)]
    divergence = [(a * (a / b).log()).sum(1).mean() for a, b in (both, rest)]
    torch.testing.assert_close(dkd(student, teacher, target), 16 * (divergence[0] + 8 * divergence[1]))
    soft = F.one_hot(target, 5).double() * 0.6 + 0.08
    torch.testing.assert_close(dkd(student, teacher, soft), dkd(student, teacher, target))


def test_dist_is_one_minus_the_correlations() -> None:
    student, teacher, _ = logits()
    p, q = teacher.softmax(1), student.softmax(1)
    between = torch.stack([1 - torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(p, q, strict=True)]).mean()
    within = torch.stack([1 - torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(p.T, q.T, strict=True)]).mean()
    torch.testing.assert_close(dist(student, teacher, 1.0, 2.0, 3.0), 2 * between + 3 * within)


@pytest.mark.parametrize("name", ["kd", "dkd", "dist"])
def test_rows_that_do_not_count_change_nothing(name: str) -> None:
    student, teacher, target = logits()

    def loss(s: Tensor, t: Tensor, y: Tensor, rows: Tensor | None) -> Tensor:
        return dkd(s, t, y, rows=rows) if name == "dkd" else {"kd": kd, "dist": dist}[name](s, t, rows=rows)

    filled = [torch.cat((x, 100 + x[:2])) for x in (student, teacher)]
    labels = torch.cat((target, torch.tensor([-100, -100])))
    torch.testing.assert_close(loss(*filled, labels, labels != -100), loss(student, teacher, target, None))
    nothing = loss(student, teacher, torch.full_like(target, -100), torch.zeros(6, dtype=torch.bool))
    assert torch.isfinite(nothing)


def test_tokens_are_rows_and_a_global_count_divides() -> None:
    student, teacher, _ = logits()
    cube = [x.view(2, 3, 5) for x in (student, teacher)]
    torch.testing.assert_close(kd(*cube), kd(student, teacher))
    torch.testing.assert_close(kd(*cube, count=torch.tensor(12.0)), kd(student, teacher) / 2)


def test_narrow_logits_are_compared_in_float32() -> None:
    student, teacher, target = logits()
    narrow = student.bfloat16(), teacher.bfloat16()
    assert kd(*narrow).dtype == dkd(*narrow, target).dtype == torch.float32


def test_a_hint_is_the_mean_squared_error_over_rows_that_count() -> None:
    ours, theirs = torch.randn(3, 4, 2, 2), torch.randn(3, 4, 2, 2)
    torch.testing.assert_close(hint(ours, theirs), F.mse_loss(ours, theirs))
    torch.testing.assert_close(hint(ours, theirs, torch.tensor([True, True, False])), F.mse_loss(ours[:2], theirs[:2]))
    tokens = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    rows = torch.tensor([1, 1, 0, 1, 0, 0]).bool()
    expected = (tokens[0] - tokens[1]).square().mean(-1).flatten()[rows].mean()
    torch.testing.assert_close(hint(*tokens, rows), expected)


def test_rkd_is_the_published_formula() -> None:
    ours, theirs = torch.randn(5, 3), torch.randn(5, 7)

    def relations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distance = torch.cdist(x, x)
        step = x[None] - x[:, None]
        return distance / distance[distance > 0].mean(), torch.stack(
            [F.normalize(s, dim=1) @ F.normalize(s, dim=1).T for s in step]
        )

    pairs = list(zip(relations(ours), relations(theirs), strict=True))
    expected = 25 * F.smooth_l1_loss(*pairs[0]) + 50 * F.smooth_l1_loss(*pairs[1])
    torch.testing.assert_close(rkd(ours, theirs), expected, rtol=1e-4, atol=1e-5)


def test_rkd_of_equal_embeddings_has_a_finite_gradient() -> None:
    ours = torch.randn(6, 4)
    ours[1:4] = 0
    ours.requires_grad_()
    rkd(ours, torch.randn(6, 4)).backward()
    assert ours.grad.abs().max() < 1e3


def test_crd_is_a_cross_entropy_over_samples_of_other_classes() -> None:
    ours, theirs = (F.normalize(torch.randn(3, 4), dim=1) for _ in range(2))
    labels = torch.tensor([0, 1, 0])
    queue = Queue(3, 4)
    queue.push(F.normalize(torch.randn(2, 4), dim=1), torch.tensor([0, 1]))
    expected = []
    for i in range(3):
        others = [theirs[j] for j in range(3) if labels[j] != labels[i]]
        others += [queue.embeddings[j] for j in range(2) if queue.labels[j] != labels[i]]
        logits = torch.stack([theirs[i], *others]) @ ours[i] / 0.07
        expected.append(F.cross_entropy(logits[None], torch.tensor([0])))
    torch.testing.assert_close(crd(ours, theirs, labels, queue), torch.stack(expected).mean())
    alone = F.cross_entropy(ours @ theirs.T / 0.07, torch.arange(3))
    torch.testing.assert_close(crd(ours, theirs, None), alone)
    torch.testing.assert_close(
        crd(ours, theirs, None, rows=torch.tensor([1, 0, 0])),
        F.cross_entropy(ours[:1] @ theirs.T / 0.07, torch.tensor([0])),
    )


def test_a_queue_keeps_the_newest() -> None:
    queue = Queue(4, 1)
    for first in (0, 3, 6):
        queue.push(torch.arange(first, first + 3.0)[:, None], torch.arange(first, first + 3))
    assert sorted(queue.labels.tolist()) == [5, 6, 7, 8]
    assert torch.equal(queue.embeddings[:, 0].long(), queue.labels)
    queue.push(torch.arange(6.0)[:, None], torch.arange(6))
    assert sorted(queue.labels.tolist()) == [2, 3, 4, 5]


def test_attention_averages_the_larger_map_down() -> None:
    large, small = torch.rand(2, 3, 8, 8), torch.rand(2, 5, 4, 4)
    expected = (attention_map(F.avg_pool2d(large, 2)) - attention_map(small)).square().mean()
    torch.testing.assert_close(attention(large, small), expected)
    torch.testing.assert_close(attention(small, large), expected)
