"""What a user reads when something went wrong: one sentence for a mistake, a traceback for a bug."""

import functools
import inspect
import os
import re
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from lathe import files, trust
from lathe.config.flags import check_flags
from lathe.config.help import configuration_folder, help_text, root_names
from lathe.config.mistakes import explain, refused_as_well
from lathe.config.schema.trainer import with_keys
from lathe.config.words import translate
from lathe.errors import Stopped, UserError, is_own, noted_item, own_places, worker_sentence
from lathe.launch.group import waited
from lathe.launch.streams import plain_warnings, quiet_torch, usable_streams
from lathe.runs.typed import CONFIG_DIR

FULL_ERROR = "LATHE_FULL_ERROR"
FULL = "HYDRA_FULL_ERROR=1 shows the traceback"


def one_sentence(main: Callable[[], Any]) -> Callable[[], None]:
    """Decorates a Hydra main: a user's mistake costs one line on stderr and exit code 1, a bug still shows its
    traceback.

    Hydra prints several lines for an error of its own unless HYDRA_FULL_ERROR is set, and then raises it. It is set
    here, so that the sentence can be made from the exception; what the user had set is kept in LATHE_FULL_ERROR.
    """

    @functools.wraps(main)
    def wrapped() -> None:
        usable_streams()
        plain_warnings()
        quiet_torch()
        try:
            _read_variables()
        except UserError as error:
            sys.exit(tell(error))
        os.environ.setdefault(FULL_ERROR, os.environ.get("HYDRA_FULL_ERROR", "0"))
        os.environ["HYDRA_FULL_ERROR"] = "1"
        trust.ask("--trust" in sys.argv[1:])
        sys.argv[1:] = [word for word in sys.argv[1:] if word != "--trust"]
        if {"-h", "--help"} & set(sys.argv[1:]):
            try:
                print(help_text([word for word in sys.argv[1:] if word not in ("-h", "--help")]), flush=True)
            except BrokenPipeError:  # `| head`, which has what it wants
                sys.exit(leave_unread())
            except Exception as error:
                sys.exit(tell(error))
            return
        try:
            sys.argv[1:] = translate(sys.argv[1:], root_names())
            _note_folder()
            main()
            sys.stdout.flush()
        except SystemExit as stop:
            silent = isinstance(stop.__context__, BrokenPipeError) and stop.code == 1  # as rich leaves
            sys.exit(_tell_unread() if silent else stop.code)
        except KeyboardInterrupt:  # where no job answers for its signals
            print("Error: stopped by Ctrl-C.", file=sys.stderr, flush=True)
            leave_at_the_next(signal.SIGINT)
            sys.exit(128 + signal.SIGINT)
        except Exception as error:
            also = [] if full_error() else refused_as_well(error, configuration_folder(), root_names())
            sys.exit(tell(UserError(*also) if also else error))

    return wrapped


def _note_folder() -> None:
    """Keeps the folder of further choices for the commands that this process and its children propose."""
    given = any(word.startswith(("--config-d", "-cd")) for word in sys.argv[1:])
    folder = check_flags(sys.argv[1:]).config_dir if given else None
    if folder is not None:
        os.environ[CONFIG_DIR] = folder


def _read_variables() -> None:
    """Variables of the environment from a file .env where the command runs; those that are set already stay."""
    if not os.path.isfile(".env"):
        return
    from dotenv import dotenv_values  # here: few have such a file

    try:
        found = dotenv_values(".env", encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f".env can't be read ({error}): mend it, or take it away.") from error
    fresh = {name: value for name, value in found.items() if value is not None and name not in os.environ}
    os.environ.update(fresh)
    if fresh and not _silent():
        print(f".env sets {', '.join(fresh)}.", flush=True)  # never the values, which are keys of accounts


def tell(error: Exception) -> int:
    """Prints what went wrong, a line for each mistake, and returns the exit code."""
    if _silent() and isinstance(error, UserError):
        return 1
    if isinstance(error, BrokenPipeError) and _is_unread():
        return _tell_unread()
    sentence = sentence_for(error) or own_sentence(error)
    if sentence is None or full_error():
        traceback.print_exception(error)
    else:
        print(*(f"Error: {line}" for line in sentence.split("\n")), sep="\n", file=sys.stderr, flush=True)
    if isinstance(error, Stopped):
        leave_at_the_next(signal.SIGINT)
    return error.code if isinstance(error, Stopped) else 1


def _tell_unread() -> int:
    words = "nobody reads standard output any more (a command such as head has ended), so this one ends too."
    try:
        print(f"Error: {words}", file=sys.stderr, flush=True)
    except BrokenPipeError:  # 2>&1: errors go the same way
        return leave_unread(1, 2)
    return leave_unread()


def _is_unread() -> bool:
    """Whether standard output is a pipe without a reader; false where the system can't tell."""
    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(1, 0)  # errors are told unasked
    return any(event & select.POLLERR for _, event in poll.poll(0))


def leave_unread(*streams: int) -> int:
    """Lets what is left of the output go nowhere, so that Python does not complain of it on its way out; the exit code
    that a shell gives for it. `streams` are those that nobody reads, by number; standard output where none is named.
    """
    with open(os.devnull, "w") as nowhere:
        for stream in streams or (1,):
            os.dup2(nowhere.fileno(), stream)
    return 128 + signal.SIGPIPE


def leave_at_the_next(number: int) -> None:
    """Ends this process at once at the next signal of that number, with its code: all is written, and a second Ctrl-C
    would show where the interpreter was on its way out.
    """
    if threading.current_thread() is threading.main_thread():
        sys.stdout.flush()
        signal.signal(number, lambda *_: os._exit(128 + number))


def _silent() -> bool:
    """Whether rank 0 says what all ranks know."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0"


def full_error() -> bool:
    """Whether the user asked for tracebacks."""
    return os.environ.get(FULL_ERROR) == "1"


def sentence_for(error: BaseException) -> str | None:
    """The sentence for a mistake that the user can mend, or None if `error` is a bug."""
    missing = (
        str(getattr(error, "missing_cfg_file", None) or error)
        if type(error).__name__ == "MissingConfigException"
        else ""
    )
    if "submitit" in missing and not find_spec("submitit"):
        return (
            "launch=slurm submits jobs through hydra-submitit-launcher, which is not installed: "
            "pip install -e '.[slurm]'."
        )
    return explain(error, root_names()) or _foreign_sentence(error)


def own_sentence(error: BaseException) -> str | None:
    """The sentence for an exception that was raised in a user's own code, or by a library that it called; None where
    the deepest code that is no library's is Lathe's.
    """
    said = " ".join(f"{type(error).__name__}: {str(error).partition('Original Traceback')[0]}".split())[:500]
    places = own_places(error)
    if not places or not places[-1][1]:
        place = _called_wrongly(error)
        return f"{place} can't be called so: {said}; {FULL}." if place else None
    item = noted_item(error)
    if "DataLoader worker process" in said:
        lines = [line for line in str(error).strip().splitlines() if not (item and line.endswith(item))]
        said = f"{lines[-1]:.500}"
    return f"{places[-1][0]} failed{f' ({item})' if item else ''}: {said}; {_other_numbers(said)}{FULL}."


def _other_numbers(said: str) -> str:
    """The way out where torch was given numbers of two kinds, most often NumPy's float64 or the integers of a file."""
    if not re.search(r"same dtype|same datatype|[Ii]nput type \(|input dtype|scalar type", said):
        return ""
    return "inputs and weights are numbers of different types: let the dataset give float32 (x.float()); "


def _called_wrongly(error: BaseException) -> str | None:
    """The function of a user's own that does not take what it was called with, and where it stands."""
    found = re.match(r"([\w.]+)\(\) (takes|missing|got)", str(error)) if isinstance(error, TypeError) else None
    if found is None:
        return None
    own = [module for module in list(sys.modules.values()) if is_own(str(getattr(module, "__file__", None)))]
    for module in own:
        function: Any = module
        for name in found.group(1).split("."):
            function = getattr(function, name, None)
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        if code is not None and is_own(code.co_filename):
            return f"{code.co_qualname} at {code.co_filename}:{code.co_firstlineno}"
    return None


def _output_fails(error: OSError) -> bool:
    """Whether what is printed is what can't be written: an empty line can't be either."""
    try:
        os.write(1, b"\n")
    except OSError as again:
        return again.errno == error.errno
    return False


def _foreign_sentence(error: BaseException) -> str | None:
    """A sentence for another library's exception that a user can mend, or None if it is a bug."""
    if _importing_torchvision(error):
        return (
            f"the installed torchvision can't be imported beside this torch ({' '.join(str(error).split()):.200}): "
            "install the one that was made for it, from the index that torch came from, or uninstall it."
        )
    if isinstance(error, OSError):
        reason = None if error.filename is not None else files.disk_reason(error)
        if reason is not None and _output_fails(error):
            return f"this command's output can't be written, {reason}."
        return files.disk_sentence(error)
    note = waited(error)
    if note is not None and note.seconds:
        return f"{note}: another rank did not come (if it was only slow, raise launch.timeout)."
    if 'Could not detect "srun"' in str(error):
        return "launch=slurm submits to SLURM, and srun is not here: type the command on a machine of the cluster."
    if isinstance(error, RuntimeError) and (gone := worker_sentence(error)) is not None:
        return gone
    if "not used in producing the loss" in str(error):
        return (
            "strategy=ddp: some parameter had no part in a loss, and every process waits for the gradients of all: add "
            "strategy.find_unused_parameters=true, or leave that parameter out of the module."
        )
    kind = type(error).__name__
    if kind == "OutOfMemoryError":
        return (
            "the GPU's memory is used up: lower data.batch_size, or try precision=bf16-mixed or "
            "trainer.accumulate_grad_batches."
        )
    if kind == "MisconfigurationException":
        place = next((place for place, own in reversed(own_places(error)) if own), None)
        said = with_keys(str(error))
        return f"{place}: {said}" if place else said
    return None


def _importing_torchvision(error: BaseException) -> bool:
    """Whether this was raised while some package imported torchvision, as torchmetrics does wherever it is found."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename.endswith("torchvision/__init__.py") and frame.name == "<module>" for frame in frames)
