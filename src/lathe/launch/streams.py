"""Standard input, output and error of a process, as whoever started it left them: a terminal of few characters, or
none at all.
"""

import logging
import os
import sys
import warnings
from typing import Any

NAMES = ("stdin", "stdout", "stderr")


def usable_streams() -> None:
    """Lets all be printed to this process's streams. Characters that one has no way to write are replaced, as a run
    must not end over the dots of a table that is too wide; where there is no stream, the null device stands in.
    """
    for number, name in enumerate(NAMES):
        stream: Any = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _nowhere(number, "w" if number else "r"))
        elif number and hasattr(stream, "reconfigure") and not _takes_all(stream):
            stream.reconfigure(errors="replace")


def plain_warnings() -> None:
    """Shows what Lathe warns of as a line that begins with Warning:, without the place in its code that Python puts
    before it and the line of code behind it, which look like a crash. Others' warnings stay as they are.
    """
    before, ours = warnings.formatwarning, os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if filename.startswith(ours):
            return f"Warning: {' '.join(str(message).split())}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = formatted


def quiet_torch() -> None:
    """Keeps the statistics that torch logs at each end off a screen that Hydra has opened for them, where a process is
    stopped amid torch's import: at its own end torch sets its levels as it or TORCH_LOGS has them.
    """
    if "torch" not in sys.modules:
        logging.getLogger("torch").setLevel(logging.WARNING)


def _takes_all(stream: Any) -> bool:
    """Whether no text can fail there: other alphabets, and the bytes of a file's name that are no text."""
    try:
        "\u2026\udcff".encode(stream.encoding, stream.errors)
    except UnicodeEncodeError:
        return False
    return True


def _nowhere(number: int, mode: str) -> Any:
    """The null device, at the stream's own number if that is free: the next file to be opened would get it, and so what
    libraries and other processes print.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        os.fstat(number)
    except OSError:
        os.dup2(nowhere, number)
        os.close(nowhere)
        nowhere = number
    os.set_inheritable(nowhere, True)
    return open(nowhere, mode, encoding="utf-8", errors="replace", closefd=False)
