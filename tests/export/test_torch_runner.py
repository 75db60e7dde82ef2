"""Calls with NumPy arrays, and their buffers."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor, nn

from lathe.export.torch_runner import full_float32, on_arrays

CPU = torch.device("cpu")  # in place of a GPU


def test_staged_answers_are_those_without_copies() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    plain, staged = on_arrays(net), on_arrays(net, None, CPU)
    draws = np.random.default_rng(0)
    for batch in (4, 1, 9, 0, 2):
        x = draws.normal(size=(batch, 3)).astype(np.float32)
        np.testing.assert_array_equal(staged(x), plain(x))
    backwards = np.frombuffer(x.tobytes(), np.float32).reshape(x.shape)[::-1]  # read-only and not contiguous
    np.testing.assert_array_equal(staged(backwards), plain(x)[::-1])


def test_an_answer_stays_when_the_next_one_comes() -> None:
    """The buffers are reused, also by threads in turn."""
    staged = on_arrays(lambda x: x.float() * 2, None, CPU)
    rows = [np.full((1 + number % 5, 2), number, np.uint8) for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(staged, rows))
    for number, answer in enumerate(answers):
        np.testing.assert_array_equal(answer, np.full((1 + number % 5, 2), 2.0 * number, np.float32))


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
