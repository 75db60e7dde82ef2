"""Calls with NumPy arrays."""

import numpy as np
import torch
from torch import Tensor, nn

from lathe.data import Normalizer
from lathe.export.torch_runner import full_float32, on_arrays, prepared

CPU = torch.device("cpu")  # in place of a GPU


def test_answers_of_a_device_are_those_without_copies() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(3, 2), np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    plain, placed = on_arrays(net), on_arrays(net, None, CPU)
    backwards = np.frombuffer(x.tobytes(), np.float32).reshape(x.shape)[::-1]  # read-only and not contiguous
    for given in (x, x[:0], backwards):
        np.testing.assert_array_equal(placed(given), plain(given))


def test_float32_is_full_within_a_call_and_restored_after_it() -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    found = []

    def call(x: Tensor) -> Tensor:
        found.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
        return x

    try:
        on_arrays(call, None, CPU)(np.zeros((1, 1), np.float32))
        assert found == [("highest", False)]
        assert torch.get_float32_matmul_precision() == "high"
        with full_float32():
            assert not torch.backends.cudnn.allow_tf32
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")


def test_pixels_are_normalised_to_the_bits_of_training() -> None:
    mean, std = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    found = prepared({"preprocess": {"in_graph": False, "mean": mean, "std": std}}, x.numpy())
    assert found.dtype == np.float32
    assert np.array_equal(found, Normalizer(mean, std, 3)(x).numpy())
    ids = np.arange(6).reshape(2, 3)
    assert prepared({"preprocess": None}, ids) is ids
