"""What a command prints and how it ends: errors, signals, and the standard streams.

A mistake is reported by a message, an error in the user's code by its frames there, a bug by its traceback.
"""

import functools
import inspect
import logging
import os
import select
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lathe.config.help import configuration_folder, help_text, root_names
from lathe.config.override_parsing import check_flags, translate
from lathe.errors import BUILDING, PACKAGE, WORKER, Stopped, UserError, source_frames, worker_message
from lathe.files import disk_sentence
from lathe.launch.process_group import find_timeout, is_reported_elsewhere, own_rank
from lathe.runs.rundir import CONFIG_DIR

FULL_ERROR = "LATHE_FULL_ERROR"
LAST_FRAMES = 3  # of the user's code


def report_errors(main: Callable[[], Any]) -> Callable[[], None]:
    """Decorate a Hydra main: print the help, translate the overrides, report errors, exit with code 1 after one.

    Hydra prints its own errors unless HYDRA_FULL_ERROR is set, and raises them then. So it is set here, and the user's
    setting is kept in LATHE_FULL_ERROR.
    """

    @functools.wraps(main)
    def wrapped() -> None:
        prepare_stdio()
        try:
            if os.path.isfile(".env"):
                _load_dotenv()
            os.environ.setdefault(FULL_ERROR, os.environ.get("HYDRA_FULL_ERROR", "0"))
            os.environ["HYDRA_FULL_ERROR"] = "1"
            _warn_of_another_clone(Path(inspect.unwrap(main).__code__.co_filename).resolve())
            arguments = sys.argv[1:]
            if {"-h", "--help"} & set(arguments):
                print(help_text([word for word in arguments if word not in ("-h", "--help")]), flush=True)
            else:
                sys.argv[1:] = translate(arguments, root_names())
                if any(word.startswith(("--config-d", "-cd")) for word in sys.argv[1:]):
                    folder = check_flags(sys.argv[1:]).config_dir
                    if folder is not None:  # for the commands that this process and its children print
                        os.environ[CONFIG_DIR] = folder
                main()
            sys.stdout.flush()
        except SystemExit as stop:
            # rich exits with 1 where standard output is closed
            closed = isinstance(stop.__context__, BrokenPipeError) and stop.code == 1
            sys.exit(discard_output() if closed else stop.code)
        except KeyboardInterrupt:  # before training has its own handler
            print("Error: stopped by Ctrl-C.", file=sys.stderr, flush=True)
            exit_on_next(signal.SIGINT)
            sys.exit(128 + signal.SIGINT)
        except Exception as error:
            from lathe.config.compose import explain_overrides  # for errors only

            verb = Path(sys.argv[0]).stem
            refused = explain_overrides(error, configuration_folder(), verb, sys.argv[1:], root_names())
            sys.exit(report_error(error if refused is None or full_error() else refused))

    return wrapped


def _warn_of_another_clone(script: Path) -> None:
    """Warn where `script`, a file of a clone, runs the code of another clone."""
    clone = script.parent.parent if script.parent.name == "scripts" else script.parent
    other = clone / "src" / "lathe"
    if (other / "__init__.py").is_file() and not other.samefile(PACKAGE) and own_rank() == 0:
        print(
            f"Warning: {script} imports lathe from {PACKAGE}, another clone: pip install -e {clone}, or set "
            f"PYTHONPATH={clone / 'src'}.",
            file=sys.stderr,
            flush=True,
        )


def _load_dotenv() -> None:
    """Set environment variables from a file .env in the working directory, unless they are set already."""
    from dotenv import dotenv_values  # most projects have no such file

    variables = dotenv_values(".env", encoding="utf-8")
    fresh = {name: value for name, value in variables.items() if value is not None and name not in os.environ}
    os.environ.update(fresh)
    if fresh and own_rank() == 0:
        print(f".env sets {', '.join(fresh)}.", flush=True)  # never the values, which may be secret


def report_error(error: Exception) -> int:
    """Print an error and return the exit code."""
    if isinstance(error, UserError) and is_reported_elsewhere(str(error)):
        return 1
    if isinstance(error, BrokenPipeError) and hasattr(select, "poll"):  # where the system can say
        poll = select.poll()
        poll.register(1, 0)  # errors are always reported
        if any(event & select.POLLERR for _, event in poll.poll(0)):  # without a reader, as after `| head`
            return discard_output()
    explained = explain_error(error) or explain_user_code(error)
    if explained is None or full_error():
        traceback.print_exception(error)
    else:
        rank = f" of rank {own_rank()}" if own_rank() else ""
        print(*(f"Error{rank}: {message}" for message in explained.args), sep="\n", file=sys.stderr, flush=True)
    if isinstance(error, Stopped):
        exit_on_next(signal.SIGINT)
        return error.code
    return 1


def full_error() -> bool:
    """True if the user asked for tracebacks."""
    return os.environ.get(FULL_ERROR) == "1"


def explain_error(error: BaseException) -> UserError | None:
    """The UserError with the message for a mistake that the user can fix; None for a bug."""
    if isinstance(error, UserError):
        return error
    from lathe.config.compose import hydra_message  # for errors only

    text, timeout = str(error), find_timeout(error)
    message = None if _is_from_user_code(error) else hydra_message(error, root_names())
    if message:
        pass
    elif isinstance(error, OSError):
        message = disk_sentence(error)
    elif timeout is not None and timeout.seconds:
        message = f"{timeout}. Another rank did not join it; raise launch.timeout if it was only slow."
    elif isinstance(error, RuntimeError) and (died := worker_message(error)) is not None:
        message = died
    elif type(error).__name__ == "OutOfMemoryError":
        message = "GPU out of memory. Lower data.batch_size, or try precision=bf16-mixed."
    elif "not used in producing the loss" in text:
        message = (
            "strategy=ddp: some parameters have no gradient from the loss. Remove them, or set "
            "strategy.find_unused_parameters=true."
        )
    elif "torchvision::nms does not exist" in text:
        message = "torchvision does not fit the installed torch. Install the matching build, or uninstall torchvision."
    elif type(error).__name__ == "MisconfigurationException":
        message = " ".join(text.split())
    return UserError(message) if message else None


def explain_user_code(error: BaseException) -> UserError | None:
    """The exception with the last frames of the user's files; None where the user's code did not raise it."""
    if not _is_from_user_code(error):
        return None
    frames = [frame for frame, own in source_frames(error) if own]
    places = traceback.format_list(frames[-LAST_FRAMES:])
    if isinstance(error, SyntaxError):  # whose lines are those of the file, which the frames show
        message = [f"{type(error).__name__}: {error.msg}", *getattr(error, "__notes__", [])]
    elif WORKER in str(error):  # the lines after the traceback in it
        message = str(error).rstrip().rpartition("\n  ")[2].splitlines()[1:] or [str(error)]
    else:  # with notes, such as the item of a dataset that could not be read
        message = "".join(traceback.format_exception_only(error)).splitlines()
    key = next((f"{line.removeprefix(BUILDING)}: " for line in message if line.startswith(BUILDING)), "")
    message = [line for line in message if not line.startswith(BUILDING)]
    lines = [*message, *"".join(places).splitlines(), "HYDRA_FULL_ERROR=1 shows the full traceback."]
    return UserError(key + "\n".join(lines))


def _is_from_user_code(error: BaseException) -> bool:
    """True if the innermost frame outside of libraries is in the user's own code."""
    frames = source_frames(error)
    return bool(frames) and frames[-1][1]


def prepare_stdio() -> None:
    """Make printing safe on any terminal, print Lathe's warnings as one line, and keep torch's statistics silent."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream: Any = getattr(sys, name)
        if stream is None:  # in this order, so that the null device gets the number of the missing stream
            stream = open(os.devnull, mode, encoding="utf-8", errors="replace")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
        elif mode == "w" and hasattr(stream, "reconfigure"):
            try:  # other alphabets, and file names that are not valid text
                "\u2026\udcff".encode(stream.encoding, stream.errors)
            except UnicodeEncodeError:
                stream.reconfigure(errors="replace")
    before, package = warnings.formatwarning, os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if filename.startswith(package):
            return f"Warning: {' '.join(str(message).split())}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    if "torch" not in sys.modules:  # torch sets its own levels at the end of its import, which Ctrl-C may interrupt
        logging.getLogger("torch").setLevel(logging.WARNING)


def discard_output() -> int:
    """Send further output to the null device, so that Python's exit does not fail, and return the exit code 141."""
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    return 128 + signal.SIGPIPE


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
        for name in ("SIGTERM", "SIGHUP"):  # Ctrl-C raises KeyboardInterrupt anyway
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
