"""Turns Ctrl-C and SIGTERM during training into `Stopped`, with the command that resumes the run."""

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

SAME_PRESS_S = 1.0  # seconds within which a second Ctrl-C counts as the first


class Interruptible(Protocol):
    """A run: `begun` after the first step is due, `interrupted` while it is ending, and the `command` to resume it."""

    begun: bool
    interrupted: bool
    given: list[Callback]
    command: str


@contextmanager
def interruptible(run: Interruptible) -> Iterator[None]:
    """Raise `Stopped` for Ctrl-C and for the signal of a Preemption callback.

    Lightning catches KeyboardInterrupt, ends the process silently, and leaves the signal ignored, as a second one
    should be.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if in_main and before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _OncePerPress(run))
    try:
        yield
    except SIGTERMException as error:
        received = next((callback.received for callback in run.given if isinstance(callback, Preemption)), None)
        raise Stopped(received or "SIGTERM", run.command) from error
    except BaseException as error:
        if not _follows_interrupt(error):
            raise
        run.interrupted = True  # also if on_exception was not called
        before = signal.SIG_IGN
        raise Stopped("SIGINT", run.command if run.begun else None) from error
    finally:
        if in_main and before is not None:  # None: a handler that was not set from Python, and can't be restored
            signal.signal(signal.SIGINT, before)


class _OncePerPress:
    """Raise KeyboardInterrupt, but not twice within a second, and not while the run is ending.

    Lightning stops ignoring the signal before it has returned, and a Ctrl-C after that would have no run to report. One
    that was lost can be repeated, since Python ignores what is raised in a destructor.
    """

    def __init__(self, run: Interruptible) -> None:
        self.run, self.last = run, float("-inf")

    def __call__(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if now - self.last >= SAME_PRESS_S and not self.run.interrupted:
            self.last = now
            raise KeyboardInterrupt


def _follows_interrupt(error: BaseException | None) -> bool:
    """Return whether `error` is a Ctrl-C or came from one: Lightning's exit, or an error of a half-written file."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None
