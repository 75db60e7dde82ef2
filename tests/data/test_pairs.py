"""Pairs of a tensor and a class number form the batch of torch's own collate, in every form."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from data.test_dataset import module
from torch.utils.data import DataLoader, default_collate

N = 12


def images(**kind: Any) -> list[torch.Tensor]:
    """Images that do not share memory."""
    return [torch.arange(24, **kind).view(2, 3, 4) + row for row in range(N)]


def mixed(fifth: Any) -> list[Any]:
    return [fifth if row == 5 else (x, row) for row, x in enumerate(images(dtype=torch.float32))]


KINDS: dict[str, Callable[[], list[Any]]] = {
    "own memory": lambda: [(x, row) for row, x in enumerate(images(dtype=torch.float32))],
    "one memory": lambda: [(x, 1) for x in torch.rand(N, 2, 3, 4)],
    "channels last": lambda: [(x.permute(2, 0, 1), 1) for x in images(dtype=torch.float32)],
    "one channels last": lambda: mixed((torch.ones(3, 4, 2).permute(2, 0, 1), 3)),
    "scalars": lambda: [(torch.tensor(float(row)), row) for row in range(N)],
    "a double": lambda: mixed((torch.ones(2, 3, 4, dtype=torch.float64), 3)),
    "a gradient": lambda: mixed((torch.ones(2, 3, 4, requires_grad=True), 3)),
    "three": lambda: [(x, 1, 2) for x in images(dtype=torch.float32)],
    "arrays": lambda: [(x.numpy(), 1) for x in images(dtype=torch.float32)],
}


class Given:
    """A dataset of these samples; `at_once` enables batched reads."""

    def __init__(self, samples: Sequence[Any], at_once: bool = False) -> None:
        self.samples = samples
        if at_once:
            self.__getitems__ = self._at_once

    def _at_once(self, rows: list[int]) -> list[Any]:
        return [self.samples[row] for row in rows]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> Any:
        return self.samples[row]


def same(found: Any, expected: Any) -> None:
    assert type(found) is list is type(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.shape, one.stride(), one.requires_grad) == (
            other.dtype,
            other.shape,
            other.stride(),
            other.requires_grad,
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at_once", [False, True])
def test_a_batch_is_that_of_torch(kind: str, at_once: bool) -> None:
    held_out = Given(KINDS[kind](), at_once)
    loader = module(Given(KINDS["own memory"]()), val=held_out, eval_batch_size=N).val_dataloader()
    for _ in range(2):  # the second time the best read size is known
        (batch,) = loader
        same(batch, default_collate(held_out.samples))


@pytest.mark.parametrize("kind", ["own memory", "one memory", "channels last", "arrays"])
def test_a_batch_of_a_worker_is_that_of_torch(kind: str) -> None:
    held_out = Given(KINDS[kind]())
    (batch,) = module(Given(KINDS["own memory"]()), val=held_out, eval_batch_size=N, num_workers=1).val_dataloader()
    (expected,) = DataLoader(held_out, N, num_workers=1)  # type: ignore[arg-type]
    same(batch, expected)
