"""Signals that end a command which does not train. Training has its own handling: it writes a checkpoint first."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lathe.errors import Stopped

SIGNALS = ("SIGTERM", "SIGHUP")  # Ctrl-C raises KeyboardInterrupt anyway


class _Signalled(BaseException):
    """Not an Exception, so that no exporter catches it."""


@contextmanager
def raise_on_signal() -> Iterator[None]:
    """Turn signals that would end the process into an exception, so that unfinished files are removed.

    Raises:
        Stopped: a signal arrived.
    """
    replaced: dict[Any, Any] = {}

    def stop(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second signal would interrupt the clean-up
        raise _Signalled(number)

    if threading.current_thread() is threading.main_thread():
        for name in SIGNALS:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # keep what nohup ignores
                replaced[number] = signal.signal(number, stop)
    try:
        yield
    except _Signalled as error:
        raise Stopped(signal.Signals(error.args[0]).name, None) from None
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def exit_on_next(number: int) -> None:
    """Exit silently at the next signal `number`: a second Ctrl-C would print a traceback of the interpreter's exit."""
    if threading.current_thread() is threading.main_thread():
        sys.stdout.flush()
        signal.signal(number, lambda *_: os._exit(128 + number))
