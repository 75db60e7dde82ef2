"""Standard input, output and error of a process, which may take few characters, be closed, or be missing."""

import logging
import os
import select
import signal
import sys
import warnings
from typing import Any

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def prepare_stdio() -> None:
    """Make printing safe on any terminal, print Lathe's warnings as one line, and keep torch's statistics silent."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream: Any = getattr(sys, name)
        if stream is None:  # in this order, so that the null device gets the number of the missing stream
            stream = open(os.devnull, mode, encoding="utf-8", errors="replace")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
        elif mode == "w" and hasattr(stream, "reconfigure") and not _encodes_all(stream):
            stream.reconfigure(errors="replace")
    _format_warnings()
    if "torch" not in sys.modules:  # torch sets its own levels at the end of its import, which Ctrl-C may interrupt
        logging.getLogger("torch").setLevel(logging.WARNING)


def _encodes_all(stream: Any) -> bool:
    """True if the stream can write any text: other alphabets, and file names that are not valid text."""
    try:
        "\u2026\udcff".encode(stream.encoding, stream.errors)
    except UnicodeEncodeError:
        return False
    return True


def _format_warnings() -> None:
    """Print a warning from Lathe's code as `Warning: <message>`, without its place in the source."""
    before = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if filename.startswith(PACKAGE):
            return f"Warning: {' '.join(str(message).split())}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = formatted


def stdout_is_closed() -> bool:
    """True if standard output is a pipe without a reader, as after `| head`; False where the system can't say."""
    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(1, 0)  # errors are always reported
    return any(event & select.POLLERR for _, event in poll.poll(0))


def discard_output() -> int:
    """Send further output to the null device, so that Python's exit does not fail, and return the exit code 141."""
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    return 128 + signal.SIGPIPE
