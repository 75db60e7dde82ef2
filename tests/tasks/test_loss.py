"""A user's loss in training and evaluation, and the messages for one that does not fit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lathe.errors import UserError
from lathe.tasks import ClassificationTask, Task, Weighted

LOGITS = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0], [1.0, 0.0, 0.0]])
LABELS = torch.tensor([0, 1, 0, 2])
FACTS = {"channels": 1, "image_size": 2, "num_classes": 3}


def task(training: bool = True, **options: Any) -> ClassificationTask:
    return ClassificationTask(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), **options).train(training)


def total(it: ClassificationTask, labels: Tensor = LABELS, logits: Tensor = LOGITS) -> float:
    with torch.set_grad_enabled(it.training):
        return sum(value.item() for value in it.losses(logits, (None, labels)).values())


@pytest.mark.parametrize("training", [True, False])
def test_any_callable_or_several_by_name(training: bool) -> None:
    expected = F.cross_entropy(LOGITS, LABELS).item()
    assert total(task(training, loss=nn.CrossEntropyLoss())) == pytest.approx(expected)
    both = {"own": F.cross_entropy, "size": Weighted(0.5, lambda outputs, targets: outputs.square().mean())}
    it = task(training, loss=both)
    assert list(it.losses(LOGITS, (None, LABELS))) == ["own", "size"]
    assert total(it) == pytest.approx(expected + 0.5 * LOGITS.square().mean().item())
    assert total(task(training, loss=nn.CrossEntropyLoss()), logits=LOGITS.bfloat16()) == pytest.approx(expected)


def test_filling_rows_are_left_out_before_a_users_loss_sees_them() -> None:
    seen: list[int] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(len(targets))
        return outputs.mean()

    it = task(False, loss=loss)
    assert total(it, torch.tensor([0, -100, 1, -100])) == pytest.approx(LOGITS[[0, 2]].mean().item())
    assert total(it, torch.full((4,), -100)) == 0
    assert seen == [2]


def test_class_weights_do_not_depend_on_the_division_of_a_batch() -> None:
    weights = torch.tensor([0.5, 1.0, 1.5])  # of [1, 2, 3], with a mean of 1
    each = F.cross_entropy(LOGITS, LABELS, reduction="none")
    expected = (weights[LABELS] * each).mean().item()
    for training in (True, False):
        it = task(training, class_weights=[1, 2, 3])
        assert total(it) == pytest.approx(expected)
        halves = [total(it, LABELS[part], LOGITS[part]) for part in (slice(0, 2), slice(2, 4))]
        assert sum(halves) / 2 == pytest.approx(expected)
    rows = torch.tensor([0, -100, 0, -100])
    assert total(it, rows) == pytest.approx((0.5 * F.cross_entropy(LOGITS, rows)).item())
    mixed = F.one_hot(LABELS, 3).float()
    assert total(task(class_weights=[1, 2, 3]), mixed) == pytest.approx(expected)
    assert total(task(class_weights=[7, 7, 7], label_smoothing=0.1)) == pytest.approx(total(task(label_smoothing=0.1)))


def test_what_a_loss_holds_stays_out_of_checkpoints_and_moves_in_the_outputs_number_format() -> None:
    it = task(loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])))
    assert set(it.state_dict()) == set(task().state_dict())
    assert total(it, logits=LOGITS.double()) == pytest.approx(total(it))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, "returns a tensor"),
        ({"loss": nn.MSELoss()}, "loss=MSELoss does not accept outputs"),
        ({"loss": lambda outputs, targets: outputs.detach().mean()}, "has no gradient"),
        ({"class_weights": [1, 2]}, "class_weights: expected a weight for each"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_that_does_not_fit_is_told_before_data_are_touched(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        task(**options).check_facts(FACTS)


class Own(Task):
    def __init__(self, terms: Any = None, sums: Any = None) -> None:
        super().__init__(nn.Identity())
        self.terms, self.sums = terms, sums

    def losses(self, outputs: Any, batch: Any) -> Any:
        return {"a": torch.zeros(())} if self.terms is None else self.terms

    def reduce(self, outputs: Any, batch: Any, loss: Any) -> Any:
        return self.sums


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    ("options", "words"),
    [({"terms": torch.zeros(())}, r"Own\.losses: "), ({"sums": torch.zeros(3)}, r"Own\.reduce: ")],
)
def test_what_a_method_returns_is_checked(split: str, options: dict[str, Any], words: str) -> None:
    it = Own(**options)
    batch = (torch.zeros(1), torch.zeros(1))
    with pytest.raises(UserError, match=words):
        it.training_loss(batch[0], batch) if split == "train" else it.evaluate_outputs(split, batch[0], batch)
