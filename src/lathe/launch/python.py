"""Training from Python, in a script or a notebook: as the command does it, without leaving anything behind. Imports no
torch.
"""

import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from omegaconf import DictConfig

import lathe
from lathe.config.composed import resolve
from lathe.config.composing import composing, overrides_of
from lathe.errors import Stopped, UserError, require
from lathe.launch.agent import UNGUARDED
from lathe.launch.outer import detect_outer
from lathe.launch.start import check_together, check_typed, launched
from lathe.launch.telling import sentence_for

__all__ = ["compose", "train"]
JOB = "lathe.verbs.inside"


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration that `python train.py` composes of the same overrides, such as `["model=mlp", "seed=1"]`, and
    holds against everything that its keys take. Keys may be changed afterwards: `cfg.optimizer.lr = 0.1`.

    Raises:
        UserError: it can't work; a sentence for each mistake.
    """
    _check_words(overrides)
    with _left_as_found(), composing("train", overrides) as cfg:
        typed = resolve(cfg)
        around = detect_outer()
        check_typed(cfg, typed, check_together(around) if typed.get("resume") is None else None)
        return cfg


def train(cfg: DictConfig | Sequence[str] = ()) -> Any:
    """Trains what `python train.py` trains, and returns the run as `lathe.load` does. `cfg` is what `compose` returned,
    changed or not, or a list of overrides. One process trains in this one; for several devices the same agent starts
    the same ranks as for the command.

    Signal handlers, environment variables, warning filters, Hydra's globals and the random states of Python, NumPy and
    torch are afterwards what they were before.

    Raises:
        UserError: the configuration can't work, or the run failed in a way that a user can mend.
        Stopped: a signal ended the run, which can be resumed.
        KeyboardInterrupt: Ctrl-C did; its message says how to resume.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a process that is only starting up
        sys.exit(UNGUARDED)
    if not isinstance(cfg, DictConfig):
        _check_words(cfg)
    with _left_as_found():
        words = overrides_of(cfg) if isinstance(cfg, DictConfig) else list(cfg)
        try:
            with composing("train", words) as composed:
                _, path = launched(composed, f"{JOB}:train_inside")
        except Stopped as stop:
            if stop.signal == "SIGINT":
                raise KeyboardInterrupt(str(stop)) from None
            raise
        except UserError:
            raise
        except Exception as error:
            sentence = sentence_for(error)
            if sentence is None:
                raise
            raise UserError(sentence) from error
        return lathe.load(path)


def _check_words(words: Any) -> None:
    listed = isinstance(words, Sequence) and not isinstance(words, str) and all(isinstance(w, str) for w in words)
    require(listed, f"{words!r}: expected a list of overrides, such as ['model=mlp', 'seed=1'].")


@contextmanager
def _left_as_found() -> Iterator[None]:
    """What a command may change for good, since its process ends with it, is put back."""
    variables, drawn = dict(os.environ), random.getstate()  # importing Lightning draws numbers
    with ExitStack() as held:
        # A command's process ends with what it froze when it imported its job; a notebook's may be garbage one day.
        if JOB not in sys.modules and not gc.get_freeze_count():  # which walks through all of it
            held.callback(gc.unfreeze)
        held.enter_context(warnings.catch_warnings())
        held.callback(_put_back, variables, _handlers())
        held.callback(random.setstate, drawn)
        yield


def _handlers() -> dict[int, Any]:
    """The signal handlers of this process; none in a thread, which can't set any."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _put_back(variables: dict[str, str], handlers: dict[int, Any]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in variables.items() if os.environ.get(name) != value})
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:  # None: not set from Python
            signal.signal(number, handler)
