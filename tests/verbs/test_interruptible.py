"""A Ctrl-C is told as a stop wherever it falls."""

import io
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lathe.errors import Stopped
from lathe.verbs.train import interruptible


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    """The first Ctrl-C leaves the signal ignored."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupted(io.RawIOBase):
    """A file amid whose `write` number `at` the user presses Ctrl-C."""

    def __init__(self, at: int) -> None:
        self.left = at

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return len(data)


@pytest.mark.parametrize("at", range(1, 9))
def test_within_the_writing_of_a_checkpoint(tmp_path: Path, at: int) -> None:
    """torch's writer then fails to close its file, and raises that."""
    start: Any = SimpleNamespace(begun=True, command="again")
    with pytest.raises(Stopped, match="continue with: again"), interruptible(start):
        torch.save({"weights": torch.ones(1000)}, Interrupted(at))


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(3)])
def test_what_came_of_no_interrupt_goes_on(tmp_path: Path, error: BaseException) -> None:
    start: Any = SimpleNamespace(begun=True, command="again")
    with pytest.raises(type(error)), interruptible(start):
        raise error
