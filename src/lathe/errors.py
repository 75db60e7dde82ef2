"""Exceptions whose message is for the user, and the location of an error in the user's own code."""

import difflib
import os
import re
import signal as signals
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
LATHE_PATHS = (PACKAGE, *(PACKAGE.parents[1] / name for name in ("train.py", "scripts", "benchmarks")))
BUILDING = "while building "  # begins the note with the component's key on an exception of its constructor
WORKER = "DataLoader worker process"  # in the message of an exception that torch raises again in the main process


class UserError(Exception):
    """A mistake in the command or the configuration.

    Each argument is one message: the key, the problem and the fix. The command line prints only the messages and exits
    with code 1; `HYDRA_FULL_ERROR=1` shows the traceback too.
    """

    def __init__(self, *messages: str) -> None:
        # `did_you_mean` may have no hint to end the message with
        super().__init__(*(re.sub(r"; *$", ".", message) for message in messages))

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class ArgumentError(UserError):
    """An argument of a component is wrong; the messages begin with its name.

    The code that builds the component from a configuration prefixes its key by `under`.
    """

    def under(self, key: str) -> UserError:
        """The same error for arguments below `key` of a configuration."""
        return UserError(*(f"{key}.{message}" for message in self.args))


@contextmanager
def under(key: str) -> Iterator[None]:
    """Prefix the messages of an ArgumentError that passes through with `key`."""
    try:
        yield
    except ArgumentError as error:
        raise error.under(key) from error


class Stopped(UserError):
    """A signal ended the run after a checkpoint was written; the run can be resumed.

    `signal` is its name, such as SIGTERM, and `command` the shell command that resumes the run, if there is one. The
    process exits with 128 plus the signal's number, as shells report it.
    """

    def __init__(self, signal: str, command: str | None) -> None:
        super().__init__(f"stopped by {signal}" + (f"; continue with: {command}" if command else ""))
        self.signal, self.command = signal, command
        self.code = 128 + signals.Signals[signal].value


def uninstalled(extra: str, *packages: str) -> str | None:
    """A message if some of `packages` can't be imported, naming the `extra` of setup.cfg that installs them."""
    from importlib.util import find_spec  # not needed for --help

    missing = [name for name in packages if find_spec(name) is None]
    return f"{' and '.join(missing)} can't be imported: pip install -e '.[{extra}]'." if missing else None


def require(condition: bool, message: str) -> None:
    """Raise UserError with `message` unless `condition` holds."""
    if not condition:
        raise UserError(message)


def refuse(messages: Iterable[str]) -> None:
    """Raise UserError with these messages, if there are any."""
    unique = list(dict.fromkeys(messages))
    if unique:
        raise UserError(*unique)


def collect_errors(*checks: Callable[[], object]) -> None:
    """Call independent checks, and raise one UserError with the messages of all that failed."""
    messages: list[str] = []
    for check in checks:
        try:
            check()
        except UserError as error:
            messages += error.args
    refuse(messages)


def did_you_mean(word: object, options: Iterable[object], otherwise: str | None = None) -> str:
    """A hint at the option nearest to `word`: the shortest that contains it, else the most similar.

    Without a near one `otherwise`, or by default a list of the options if they are few.
    """
    names, text = sorted(map(str, options)), str(word)
    holds = [name for name in names if len(text) > 2 and text.lower() in name.lower()]
    close = sorted(holds, key=lambda name: (not name.lower().startswith(text.lower()), len(name)))
    close = close or difflib.get_close_matches(text, names, n=1, cutoff=0.5 if len(text) < 4 else 0.6)
    if close:
        return f"did you mean {close[0]}?"
    listed = f"choose one of {', '.join(names)}" if 0 < len(names) <= 40 else ""
    return listed if otherwise is None else otherwise


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the file's name to an OSError that passes through, since a failed write names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def is_user_file(name: str) -> bool | None:
    """True for a user's file, False for Lathe's, None for an installed package's or no file at all."""
    if not Path(name).is_absolute():
        return None
    path = Path(name).resolve()
    packages = (Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib"))
    if any(path.is_relative_to(folder) for folder in packages):
        return None
    return not any(path.is_relative_to(own) for own in LATHE_PATHS)


def source_frames(error: BaseException) -> list[tuple[traceback.FrameSummary, bool]]:
    """The frames of `error` outside of installed packages, innermost last, each with `is_user_file`.

    Those of a DataLoader's worker are read from the traceback that torch puts into the message.
    """
    frames = list(traceback.extract_tb(error.__traceback__))
    if isinstance(error, SyntaxError) and error.filename:
        frames.append(traceback.FrameSummary(error.filename, error.lineno or 0, "<module>", line=error.text))
    if WORKER in str(error):
        lines = re.findall(r'File "(.+)", line (\d+), in (\S+)\n +(.+)', str(error))
        frames += [traceback.FrameSummary(file, int(line), name, line=code) for file, line, name, code in lines]
    return [(frame, own) for frame in frames if (own := is_user_file(frame.filename)) is not None]


def user_location(error: BaseException) -> str:
    """The innermost frame of `error` in the user's own code as " (file:line)"; empty if there is none."""
    frames = [frame for frame, own in source_frames(error) if own]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def worker_message(error: BaseException) -> str | None:
    """The message for a DataLoader worker process that died; None for anything else, such as an error of a dataset."""
    # the signal's name is in the cause, where torch has noticed the death at its queue as well
    matches = [
        re.match(r"DataLoader worker \(pid\S* [\d, ]+\) ([^.]+)", str(raised)) for raised in (error.__cause__, error)
    ]
    died = matches[0] or matches[1]
    closed = isinstance(error, (ConnectionError, EOFError)) and WORKER not in str(error)
    if died is None and not closed:
        return None
    how = died[1].replace("is killed", "was killed") if died else "ended unexpectedly"
    shared = " and raise the limit of shared memory (/dev/shm)" if "Bus error" in how else ""
    return (
        f"a DataLoader worker {how}; it may have run out of memory. Lower data.num_workers{shared}, or find the cause "
        "with data.num_workers=0."
    )
