"""Sizes, MACs, memory and agreement of a receipt, against arithmetic."""

import pytest
import torch
from torch import nn

from lathe.nets import MLP
from lathe.receipt.measured import changed_nothing, peak_memory, scored
from lathe.tasks import ClassificationTask


def net() -> MLP:
    return MLP(channels=1, image_size=4, num_classes=3, width=8, depth=2)


def test_methods_that_left_no_trace_are_named() -> None:
    kinds = {
        "distill": "distillation",
        "prune": "masks",
        "qat": "quantization",
        "prune_channels": "structure",
        "ptq_static": "after",
    }
    found = changed_nothing(kinds, net())
    assert [text.split()[0] for text in found] == [f"compression={name}" for name in kinds if name != "distill"]
    assert all("changed nothing" in text for text in found)
    masked = net()
    with torch.no_grad():
        masked.head.weight[0].zero_()
    assert changed_nothing({"prune": "masks"}, masked) == []


def test_peak_memory_counts_weights_and_the_fullest_moment() -> None:
    some = nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 2))
    with torch.no_grad():
        peak = peak_memory(some, torch.zeros(5, 4))
    weights = 4 * (400 + 100 + 200 + 2)
    assert peak == weights + 4 * (20 + 500 + 10)


def test_agreement_leaves_out_what_does_not_count() -> None:
    some = nn.Identity()
    batches = [(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.tensor([1, -100])), (torch.eye(2), torch.tensor([0, 0]))]
    metrics, told = scored(ClassificationTask(some), some, batches, torch.neg)
    assert metrics["accuracy"] == pytest.approx(2 / 3)
    assert told is not None
    assert (told.share, told.n, told.largest) == (0.0, 3, 4.0)
