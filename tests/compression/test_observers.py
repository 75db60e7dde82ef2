"""Ranges chosen from histograms, and the affine integers of a range."""

import pytest
import torch

from lathe.compression.quantization.observers import Histogram, affine


def test_affine_integers_hold_zero_and_both_ends() -> None:
    scale, zero_point = affine(torch.tensor([-1.0, 0.0, 0.0]), torch.tensor([3.0, 2.0, 0.0]), 255)
    assert scale.tolist() == pytest.approx([4 / 255, 2 / 255, 1 / 255])
    assert zero_point.tolist() == [64, 0, 0]


def test_percentiles_of_one_and_two_sides() -> None:
    values = torch.linspace(-1, 1, 100001)
    both = Histogram(-1.0, 1.0)
    both.add(values)
    assert both.range("percentile", 99.0, 8) == pytest.approx((-0.99, 0.99), abs=2e-3)
    one = Histogram(0.0, 1.0)
    one.add(values.abs())
    assert one.range("percentile", 99.0, 8) == pytest.approx((0.0, 0.99), abs=2e-3)
    assert one.range("minmax", 99.0, 8) == (0.0, 1.0)


def test_entropy_keeps_what_is_evenly_spread_and_cuts_a_lonely_outlier() -> None:
    even = Histogram(0.0, 1.0)
    even.add(torch.linspace(0, 1, 100001))
    assert even.range("entropy", 0.0, 8)[1] > 0.97
    torch.manual_seed(0)
    values = torch.randn(100000).abs()
    values[0] = 40.0
    lonely = Histogram(0.0, 40.0)
    lonely.add(values)
    assert 3 < lonely.range("entropy", 0.0, 8)[1] < 10


def test_an_empty_range_stays_empty() -> None:
    nothing = Histogram(0.0, 0.0)
    nothing.add(torch.zeros(5))
    assert nothing.range("entropy", 0.0, 8) == (0.0, 0.0)
