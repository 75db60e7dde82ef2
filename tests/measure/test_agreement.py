"""Agreement compared with values by hand."""

import math

import torch

from lathe.measure.agreement import Agreement, AgreementMeter


def test_labels_agree_one_by_one_and_values_are_no_predictions() -> None:
    outputs, reference = torch.tensor([[1.0, -2.0], [3.0, -1.0]]), torch.tensor([[2.0, 0.5], [3.0, -4.0]])
    meter = AgreementMeter("labels")
    meter.add(outputs, reference)
    meter.add(outputs, reference, torch.tensor([[True, False], [False, False]]))
    assert meter.result == Agreement(0.8, 3.0, 5)
    meter = AgreementMeter("values")
    meter.add(outputs, reference)
    meter.add(outputs[:, 0], reference[:, 0])
    assert meter.result == Agreement(None, 3.0, 6)


def test_a_net_that_answers_nan_does_not_agree() -> None:
    meter = AgreementMeter()
    meter.add(torch.tensor([[float("nan"), 1.0]]), torch.tensor([[2.0, 1.0]]))
    meter.add(torch.tensor([[2.0, 1.0]]), torch.tensor([[2.0, 1.0]]))
    assert math.isnan(meter.result.largest)
