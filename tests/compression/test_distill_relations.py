"""Distances, angles, and picking out the right one of many."""

import pytest
import torch
import torch.nn.functional as F

from lathe.compression.distillation.relations import Projections, Queue, crd, rkd


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


def test_rkd_ignores_scale_and_rotation() -> None:
    ours = torch.randn(6, 4)
    rotation = torch.linalg.qr(torch.randn(4, 4))[0]
    assert rkd(ours, 3 * ours @ rotation + 1) < 1e-5


def test_rkd_of_equal_embeddings_has_a_finite_gradient() -> None:
    ours = torch.randn(6, 4)
    ours[1:4] = 0
    ours.requires_grad_()
    rkd(ours, torch.randn(6, 4)).backward()
    assert ours.grad is not None
    assert ours.grad.abs().max() < 1e3


def test_rkd_leaves_out_rows_that_do_not_count() -> None:
    ours, theirs = torch.randn(6, 4), torch.randn(6, 3)
    rows = torch.tensor([1, 1, 1, 1, 0, 0]).bool()
    torch.testing.assert_close(rkd(ours, theirs, 1, 0, rows=rows), rkd(ours[:4], theirs[:4], 1, 0))


def test_a_queue_keeps_the_newest() -> None:
    queue = Queue(4, 1)
    for first in (0, 3, 6):
        queue.push(torch.arange(first, first + 3.0)[:, None], torch.arange(first, first + 3))
    assert sorted(queue.labels.tolist()) == [5, 6, 7, 8]
    assert torch.equal(queue.embeddings[:, 0].long(), queue.labels)
    queue.push(torch.arange(6.0)[:, None], torch.arange(6))
    assert sorted(queue.labels.tolist()) == [2, 3, 4, 5]


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


@pytest.mark.parametrize("shape", [(5,), (5, 1, 1)])
def test_projections_give_unit_vectors(shape: tuple[int, ...]) -> None:
    ours, theirs = Projections(5, 5, 8)(torch.rand(2, *shape), torch.rand(2, *shape))
    torch.testing.assert_close(ours.norm(dim=1), torch.ones(2))
    assert theirs.shape == (2, 8)
