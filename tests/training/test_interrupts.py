"""Ctrl-C ends a run as `Stopped`, at any moment."""

import io
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lathe.errors import Stopped
from lathe.training import run_start
from lathe.training.run_start import interruptible


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    """Set Python's own handler: the first Ctrl-C leaves the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def running() -> Any:
    return SimpleNamespace(begun=True, interrupted=False, callbacks=[], command="again")


class Interrupted(io.RawIOBase):
    """A file in which the user presses Ctrl-C at `write` number `at`."""

    def __init__(self, at: int) -> None:
        self.left = at

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return len(data)


@pytest.mark.parametrize("at", [1, 4, 8])
def test_while_a_checkpoint_is_written(tmp_path: Path, at: int) -> None:
    """torch's writer then fails to close its file, and raises that."""
    start = running()
    with pytest.raises(Stopped, match="continue with: again"), interruptible(start):
        torch.save({"weights": torch.ones(1000)}, Interrupted(at))


def test_a_lost_interrupt_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ignores what is raised in a destructor."""
    moments = iter((10.0, 10.0 + 0.9 * run_start.SAME_PRESS_S, 10.0 + 1.1 * run_start.SAME_PRESS_S))
    # of this module only, since other threads read the clock
    monkeypatch.setattr(run_start, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    with pytest.raises(Stopped), interruptible(running()):
        pressed_three_times()


def pressed_three_times() -> None:
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)  # within the same second
    signal.raise_signal(signal.SIGINT)
    pytest.fail("the third was ignored")


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_another_handler_is_kept(handler: Any) -> None:
    """nohup and notebooks set one."""
    signal.signal(signal.SIGINT, handler)
    with interruptible(running()):
        assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_thread_sets_no_handler() -> None:
    def handler() -> Any:
        with interruptible(running()):
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handler).result() is signal.getsignal(signal.SIGINT)
