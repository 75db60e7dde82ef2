"""Error reporting: a message for a mistake, the frames of the user's code for an error in it, a traceback for a bug."""

import functools
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lathe.config.help import configuration_folder, help_text, root_names
from lathe.config.override_parsing import check_flags, translate
from lathe.errors import BUILDING, PACKAGE, WORKER, Stopped, UserError, source_frames, worker_message
from lathe.files import disk_sentence
from lathe.launch.process_group import find_timeout
from lathe.launch.signals import exit_on_next
from lathe.launch.stdio import discard_output, prepare_stdio, stdout_is_closed
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
            _load_dotenv()
            os.environ.setdefault(FULL_ERROR, os.environ.get("HYDRA_FULL_ERROR", "0"))
            os.environ["HYDRA_FULL_ERROR"] = "1"
            warn_of_another_clone(Path(inspect.unwrap(main).__code__.co_filename).resolve())
            words = sys.argv[1:]
            if {"-h", "--help"} & set(words):
                print(help_text([word for word in words if word not in ("-h", "--help")]), flush=True)
            else:
                sys.argv[1:] = translate(words, root_names())
                _remember_config_dir()
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


def warn_of_another_clone(script: Path) -> None:
    """Warn where `script`, a file of a clone, runs the code of another clone."""
    clone = script.parent.parent if script.parent.name == "scripts" else script.parent
    other = clone / "src" / "lathe"
    if (other / "__init__.py").is_file() and not other.samefile(PACKAGE) and _is_rank_0():
        print(
            f"Warning: {script} imports lathe from {PACKAGE}, another clone: pip install -e {clone}, or set "
            f"PYTHONPATH={clone / 'src'}.",
            file=sys.stderr,
            flush=True,
        )


def _load_dotenv() -> None:
    """Set environment variables from a file .env in the working directory, unless they are set already."""
    if not os.path.isfile(".env"):
        return
    from dotenv import dotenv_values  # most projects have no such file

    found = dotenv_values(".env", encoding="utf-8")
    fresh = {name: value for name, value in found.items() if value is not None and name not in os.environ}
    os.environ.update(fresh)
    if fresh and _is_rank_0():
        print(f".env sets {', '.join(fresh)}.", flush=True)  # never the values, which may be secret


def _remember_config_dir() -> None:
    """Keep --config-dir for the commands that this process and its children print."""
    if any(word.startswith(("--config-d", "-cd")) for word in sys.argv[1:]):
        folder = check_flags(sys.argv[1:]).config_dir
        if folder is not None:
            os.environ[CONFIG_DIR] = folder


def report_error(error: Exception) -> int:
    """Print an error and return the exit code."""
    if isinstance(error, UserError) and not _is_rank_0():
        return 1  # rank 0 has the same mistake
    if isinstance(error, BrokenPipeError) and stdout_is_closed():
        return discard_output()
    explained = explain_error(error) or explain_user_code(error)
    if explained is None or full_error():
        traceback.print_exception(error)
    else:
        print(*(f"Error: {message}" for message in explained.args), sep="\n", file=sys.stderr, flush=True)
    if isinstance(error, Stopped):
        exit_on_next(signal.SIGINT)
        return error.code
    return 1


def full_error() -> bool:
    """True if the user asked for tracebacks."""
    return os.environ.get(FULL_ERROR) == "1"


def _is_rank_0() -> bool:
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def explain_error(error: BaseException) -> UserError | None:
    """The UserError with the message for a mistake that the user can fix; None for a bug."""
    if isinstance(error, UserError):
        return error
    from lathe.config.compose import hydra_message  # for errors only

    message = (None if _is_from_user_code(error) else hydra_message(error, root_names())) or _library_message(error)
    return None if message is None else UserError(message)


def explain_user_code(error: BaseException) -> UserError | None:
    """The exception with the last frames of the user's files; None where the user's code did not raise it."""
    if not _is_from_user_code(error):
        return None
    frames = [frame for frame, own in source_frames(error) if own]
    places = traceback.format_list(frames[-LAST_FRAMES:])
    message = _exception_lines(error)
    key = next((f"{line.removeprefix(BUILDING)}: " for line in message if line.startswith(BUILDING)), "")
    message = [line for line in message if not line.startswith(BUILDING)]
    lines = [*message, *"".join(places).splitlines(), "HYDRA_FULL_ERROR=1 shows the full traceback."]
    return UserError(key + "\n".join(lines))


def _is_from_user_code(error: BaseException) -> bool:
    """True if the innermost frame outside of libraries is in the user's own code."""
    frames = source_frames(error)
    return bool(frames) and frames[-1][1]


def _exception_lines(error: BaseException) -> list[str]:
    """The exception's type and message, and its notes, such as the item of a dataset that could not be read."""
    if isinstance(error, SyntaxError):  # whose lines are those of the file, which the frames show
        return [f"{type(error).__name__}: {error.msg}", *getattr(error, "__notes__", [])]
    if WORKER in str(error):  # the lines after the traceback in it
        return str(error).rstrip().rpartition("\n  ")[2].splitlines()[1:] or [str(error)]
    return "".join(traceback.format_exception_only(error)).splitlines()


def _library_message(error: BaseException) -> str | None:
    """The fix for errors of torch, Lightning and the disk that users meet often."""
    text = str(error)
    if isinstance(error, OSError):
        return disk_sentence(error)
    timeout = find_timeout(error)
    if timeout is not None and timeout.seconds:
        return f"{timeout}. Another rank did not join it; raise launch.timeout if it was only slow."
    if isinstance(error, RuntimeError) and (died := worker_message(error)) is not None:
        return died
    if type(error).__name__ == "OutOfMemoryError":
        return "GPU out of memory. Lower data.batch_size, or try precision=bf16-mixed."
    if "not used in producing the loss" in text:
        return (
            "strategy=ddp: some parameters have no gradient from the loss. Remove them, or set "
            "strategy.find_unused_parameters=true."
        )
    if "torchvision::nms does not exist" in text:
        return "torchvision does not fit the installed torch. Install the matching build, or uninstall torchvision."
    if type(error).__name__ == "MisconfigurationException":
        return " ".join(text.split())
    return None
