"""A small net and task for the tests of callbacks."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from support.tiny import MemoryLogger, TinyLoader, TinyTask, make_trainer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """With a net this small, several threads cost 10 ms a step on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny() -> SimpleNamespace:
    return SimpleNamespace(Task=TinyTask, Loader=TinyLoader, Logger=MemoryLogger, trainer=make_trainer)
