"""Ctrl-C and SIGTERM end a run as stops that it goes on from."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lathe.callbacks import Preemption
from lathe.errors import Stopped

MOMENT_S = 1.0  # within which a second Ctrl-C means the same as the first


class Begun(Protocol):
    """What is asked of a run: whether it has begun, whether it is on its way out, its callbacks, and the command that
    goes on with it.
    """

    begun: bool
    interrupted: bool
    given: list[Callback]
    command: str


@contextmanager
def interruptible(run: Begun) -> Iterator[None]:
    """Tells a Ctrl-C as a stop: Lightning takes it in, and ends the process without a word. It leaves the signal
    ignored, which a second one should be. A SIGTERM that was heard between two batches is told by what sent it.

    Raises:
        Stopped: a signal ended what is within.
    """
    mine = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if mine and before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _Once(run))
    try:
        yield
    except SIGTERMException as error:
        received = next((callback.received for callback in run.given if isinstance(callback, Preemption)), None)
        raise Stopped(received or "SIGTERM", run.command) from error
    except BaseException as error:
        if not _follows_interrupt(error):
            raise
        run.interrupted = True  # also where no callback was told
        before = signal.SIG_IGN
        raise Stopped("SIGINT", run.command if run.begun else None) from error
    finally:
        if mine and before is not None:  # None: not set from Python, which can't put it back, and not changed here
            signal.signal(signal.SIGINT, before)


class _Once:
    """Raises KeyboardInterrupt, as Python's own handler does, but not again within the same moment, nor where the run
    is on its way out: Lightning takes its own ignoring back before it has left, and a Ctrl-C between that and its
    caller would be told as one without a run. One that was lost (Python ignores what is raised in a destructor) can be
    repeated.
    """

    def __init__(self, run: Begun) -> None:
        self.run, self.last = run, float("-inf")

    def __call__(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if now - self.last >= MOMENT_S and not self.run.interrupted:
            self.last = now
            raise KeyboardInterrupt


def _follows_interrupt(error: BaseException | None) -> bool:
    """Whether it is a Ctrl-C, or came of one: Lightning's exit, or what closing a half-written file raised."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None
