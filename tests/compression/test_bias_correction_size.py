"""Means are measured on as many inputs as fit in memory."""

import pytest
import torch
from torch import nn

from lathe.compression.quantization.bias_correction import channel_means, first_inputs


@pytest.mark.parametrize(
    ("shape", "kind", "rows"),
    [
        ((1, 8, 8), torch.float32, 1024),
        ((3, 224, 224), torch.float32, 2**23 // 224**2),
        ((1024,), torch.int64, 4),
        ((32,), torch.int64, 128),
        ((8192,), torch.int64, 1),
        ((64,), torch.float32, 1024),
    ],
)
def test_how_many_inputs(shape: tuple[int, ...], kind: torch.dtype, rows: int) -> None:
    batches = (
        [torch.zeros(shape, dtype=kind).expand(600, *shape)] * 2
        if len(shape) < 2 or shape[-1] < 100
        else [torch.zeros(shape, dtype=kind).expand(170, *shape)]
    )
    assert len(first_inputs(batches)) == rows


def test_means_in_parts_are_the_means() -> None:
    images, tokens = torch.randn(100, 4, 5, 5, dtype=torch.float64).float(), torch.randn(100, 7, 4)
    torch.testing.assert_close(channel_means(nn.Conv2d(1, 4, 1), images), images.double().mean((0, 2, 3)).float())
    torch.testing.assert_close(channel_means(nn.Linear(1, 4), tokens), tokens.double().mean((0, 1)).float())
