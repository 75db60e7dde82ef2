"""Cross-entropy and accuracy compared with values by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lathe.errors import UserError
from lathe.tasks import ClassificationTask

LOGITS = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0], [1.0, 0.0, 0.0]])
LABELS = torch.tensor([0, 1, 0, 2])  # right, right, wrong, wrong


def task(training: bool = True, **options: Any) -> ClassificationTask:
    return ClassificationTask(nn.Linear(2, 3), **options).train(training)


def nll(row: list[float], label: int) -> float:
    return math.log(sum(math.exp(value) for value in row)) - row[label]


def hand(rows: list[int], labels: Tensor = LABELS) -> float:
    return sum(nll(LOGITS[row].tolist(), int(labels[row])) for row in rows) / len(rows)


def run(it: ClassificationTask, logits: Tensor, target: Tensor) -> tuple[float, list[float]]:
    batch = (torch.empty(len(target), 0), target)
    loss = it.losses(logits, batch)["cross_entropy"]
    return loss.item(), it.reduce(logits, batch, loss.detach()).tolist()


@pytest.mark.parametrize("training", [True, False])
def test_cross_entropy_and_accuracy(training: bool) -> None:
    loss, sums = run(task(training), LOGITS, LABELS)
    assert loss == pytest.approx(hand([0, 1, 2, 3]), rel=1e-6)
    assert sums == pytest.approx([4 * loss, 2, 4], rel=1e-6)


def test_label_smoothing_is_szegedys_in_training_and_absent_in_evaluation() -> None:
    smooth = 0.3
    rows = LOGITS.tolist()
    expected = 0.0
    for row, label in zip(rows, LABELS.tolist(), strict=True):
        share = [smooth / 3 + (1 - smooth) * (k == label) for k in range(3)]
        expected += sum(p * nll(row, k) for k, p in enumerate(share)) / 4
    assert run(task(label_smoothing=smooth), LOGITS, LABELS)[0] == pytest.approx(expected, rel=1e-6)
    assert run(task(False, label_smoothing=smooth), LOGITS, LABELS)[0] == pytest.approx(hand([0, 1, 2, 3]), rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_class_probabilities_as_mixup_gives_them(training: bool) -> None:
    target = torch.tensor([[0.7, 0.3, 0.0], [0.4, 0.6, 0.0], [0.9, 0.0, 0.1], [0.0, 0.0, 1.0]])
    loss, sums = run(task(training), LOGITS, target)
    expected = (
        sum(p * nll(LOGITS[i].tolist(), k) for i, row in enumerate(target.tolist()) for k, p in enumerate(row)) / 4
    )
    assert loss == pytest.approx(expected, rel=1e-6)
    assert sums == pytest.approx([4 * expected, 2, 4], rel=1e-6)  # compared with the largest class: rows 0 and 1


def test_rows_that_only_fill_up_do_not_count_in_evaluation() -> None:
    labels = torch.tensor([0, -100, 0, -100])
    loss, sums = run(task(False), LOGITS, labels)
    assert loss == pytest.approx(hand([0, 2], labels), rel=1e-6)
    assert sums == pytest.approx([2 * loss, 1, 2], rel=1e-6)

    n = 4096  # whose sum keeps its digits in half precision
    loss, sums = run(task(False), torch.zeros(n, 3, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.long))
    assert sums[1:] == [n, n]
    assert loss == pytest.approx(math.log(3), rel=1e-3)


@pytest.mark.parametrize("kind", ["dict", "tuple", "two of the shape"])
def test_a_net_may_return_more_than_logits(kind: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            y = self.head(x.flatten(1))
            if kind == "dict":
                return {"hidden": x, "logits": y}
            return ((x, y) if kind == "tuple" else (y, y)) if self.training else y

    it: Any = ClassificationTask(Net())
    facts = {"channels": 1, "image_size": 2, "num_classes": 3}
    if kind == "two of the shape":
        with pytest.raises(UserError, match="Return logits"):
            it.take_logits(facts, train=True)
        return
    it.take_logits(facts, train=True)
    batch = (torch.randn(5, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1]))
    expected = nn.functional.cross_entropy(it.net.head(batch[0].flatten(1)), batch[1])
    assert torch.equal(it.train().training_step(batch, 0), expected)
    assert it.eval()(batch[0]).shape == (5, 3)
