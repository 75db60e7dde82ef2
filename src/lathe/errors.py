"""The exceptions that a user is meant to see."""

import difflib
import functools
import os
import re
import signal as signals
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LATHES = (HERE, *(HERE.parents[1] / name for name in ("train.py", "scripts", "benchmarks")))  # of a clone


class UserError(Exception):
    """A mistake that whoever typed the command can mend.

    Its message is one sentence that names the key, the value and the way out, or one for each of several mistakes. The
    command line prints these alone, a line each, and exits with 1; `HYDRA_FULL_ERROR=1` brings the traceback back.
    """

    def __init__(self, *sentences: str) -> None:
        # of proposals there may be none
        super().__init__(*(re.sub(r"; *$", ".", one) if isinstance(one, str) else one for one in sentences))

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class ArgumentError(UserError):
    """An argument of a part is wrong: the sentences begin with its name, before which whoever built the part from a
    configuration puts the key, by `under`."""

    def under(self, key: str) -> UserError:
        """The same of arguments that stand below `key` of a configuration."""
        return UserError(*(f"{key}.{sentence}" for sentence in self.args))


@contextmanager
def under(key: str) -> Iterator[None]:
    """Puts `key` before the sentences of an ArgumentError that passes through."""
    try:
        yield
    except ArgumentError as error:
        raise error.under(key) from error


class Stopped(UserError):
    """A signal ended the run at a step boundary after a checkpoint was written: it can be resumed.

    `signal` is its name, such as SIGTERM, and `command` the line for a shell that resumes it, if there is one. The
    process exits with 128 plus the signal's number, as shells report it.
    """

    def __init__(self, signal: str, command: str | None) -> None:
        super().__init__(f"stopped by {signal}" + (f"; continue with: {command}" if command else ""))
        self.signal, self.command = signal, command
        self.code = 128 + signals.Signals[signal].value


def uninstalled(extra: str, *packages: str) -> str | None:
    """None, or the sentence that says which of `packages` can't be imported, and the extra of setup.cfg that brings
    them.
    """
    from importlib.util import find_spec  # here: --help need not import it

    missing = [name for name in packages if find_spec(name) is None]
    return f"{' and '.join(missing)} can't be imported: pip install -e '.[{extra}]'." if missing else None


def require(condition: bool, sentence: str) -> None:
    """Raises UserError with `sentence` unless `condition` holds."""
    if not condition:
        raise UserError(sentence)


def refuse(sentences: Iterable[str]) -> None:
    """Raises UserError with these sentences, if there are any."""
    found = list(dict.fromkeys(sentences))
    if found:
        raise UserError(*found)


def together(*checks: Callable[[], object]) -> None:
    """Calls these, which need nothing of each other.

    Raises:
        UserError: some of them did; with the sentences of all.
    """
    told: list[str] = []
    for check in checks:
        try:
            check()
        except UserError as error:
            told += error.args
    refuse(told)


def did_you_mean(word: object, options: Iterable[object], otherwise: str | None = None) -> str:
    """A clause that proposes the nearest of `options`: the shortest that begins with the word or holds it, else the one
    spelled most alike; where none is near `otherwise`, or without it a list of them if they are few."""
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
    """Gives an OSError that passes through the name of the file that was written: a full disk is met by a write, which
    knows of none.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


@functools.cache
def _libraries() -> list[Path]:
    """The folders of Python's own modules and of installed packages."""
    return [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")]


def is_own(name: str) -> bool | None:
    """Whether the file of that name is a user's own code, and not Lathe's; None for a library's, or none at all."""
    if not Path(name).is_absolute():
        return None
    path = Path(name).resolve()
    if any(path.is_relative_to(folder) for folder in _libraries()):
        return None
    return not any(path.is_relative_to(place) for place in LATHES)


def own_places(error: BaseException) -> list[tuple[str, bool]]:
    """The places outside of libraries that `error` has passed, the deepest last: function, file and line, and whether
    that is a user's own code (or Lathe's). What a worker of a DataLoader met is read off the text that it sent.
    """
    frames: list[tuple[str, Any, str]] = [
        (frame.f_code.co_filename, line, frame.f_code.co_qualname)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno, "<module>"))
    if "DataLoader worker process" in str(error):
        frames += re.findall(r'File "(.+)", line (\d+), in (\S+)', str(error))
    found = [(f"{function} at {name}:{line}", is_own(name)) for name, line, function in frames]
    return [(place, own) for place, own in found if own is not None]


def item_note(key: str, row: int) -> str:
    """What is added to an exception that a dataset raised: `add_note` survives the way from a DataLoader's worker."""
    return f"Met while reading {key}: item {row}"


def noted_item(error: BaseException) -> str:
    """The item that `item_note` names with `error`, such as `data.train: item 3`; empty where there is none."""
    told = [*getattr(error, "__notes__", []), str(error)]
    found = [match[1] for text in told for match in re.finditer(r"^Met while reading (.+: item \d+)$", text, re.M)]
    return found[-1] if found else ""


def own_place(error: BaseException) -> str:
    """The last place in a user's own code that `error` has passed, in brackets behind a space; empty where there is
    none.
    """
    return next((f" ({place.partition(' at ')[2]})" for place, own in reversed(own_places(error)) if own), "")


def worker_sentence(error: BaseException) -> str | None:
    """What became of a process that read data for a DataLoader, and the way out; None where `error` tells of none. What
    the dataset raised in one is no such end.
    """
    # the system's word comes first, where torch has noticed it at its queue as well
    told = [re.match(r"DataLoader worker \(pid\S* [\d, ]+\) ([^.]+)", str(one)) for one in (error.__cause__, error)]
    ended = told[0] or told[1]
    cut = isinstance(error, (ConnectionError, EOFError)) and "DataLoader worker process" not in str(error)
    if ended is None and not cut:
        return None
    how = ended[1].replace("is killed", "was killed") if ended else "ended unexpectedly"
    shared = ", and raise the limit of shared memory (/dev/shm)" if "Bus error" in how else ""
    return (
        f"a process that reads data {how}, as where memory is used up or the dataset's own code ends it: lower "
        f"data.num_workers{shared}; data.num_workers=0 reads in this process, and shows what happens there."
    )
