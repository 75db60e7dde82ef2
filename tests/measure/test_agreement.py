"""Agreement compared with values by hand."""

import math

import torch

from lathe.measure.agreement import Agreement, AgreementMeter


def test_places_that_do_not_count() -> None:
    meter = AgreementMeter()
    outputs = torch.zeros(2, 3, 4)
    outputs[..., 1] = 1.0
    reference = outputs.clone()
    reference[0, 0, 2] = 9.0  # another prediction
    reference[1, 2, 3] = 99.0  # filling
    counts = torch.ones(2, 3, dtype=torch.bool)
    counts[1, 2] = False
    meter.add(outputs, reference, counts)
    meter.add(outputs[:1], reference[1:], torch.zeros(1, 3, dtype=torch.bool))
    assert meter.result == Agreement(0.8, 9.0, 5)


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
