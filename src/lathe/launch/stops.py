"""Signals that end a command which trains nothing: it takes back what it has begun, and says so."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lathe.errors import Stopped

SIGNALS = ("SIGTERM", "SIGHUP")  # Ctrl-C raises KeyboardInterrupt anyway


class _Signalled(BaseException):
    """No Exception: what exporters catch must not hold it up."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Signals that would end the process unwind the block first, so that nothing half-written is left. Not for
    training, which goes on to the end of its step and writes a checkpoint.

    Raises:
        Stopped: one came.
    """
    taken: dict[Any, Any] = {}

    def stop(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one would break off what takes back
        raise _Signalled(number)

    if threading.current_thread() is threading.main_thread():
        for name in SIGNALS:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # what nohup ignores stays ignored
                taken[number] = signal.signal(number, stop)
    try:
        yield
    except _Signalled as error:
        raise Stopped(signal.Signals(error.args[0]).name, None) from None
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
