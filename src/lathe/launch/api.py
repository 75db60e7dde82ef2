"""Training from Python, in a script or a notebook, as the command does it. Imports no torch.

Signal handlers, environment variables, warning filters, Hydra's globals and the random states of Python, NumPy and
torch are restored afterwards.
"""

import importlib
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig

import lathe
from lathe.config.compose import composing, overrides_of
from lathe.config.resolve import resolve
from lathe.errors import Stopped, require
from lathe.launch.command_checks import check_command, launch_checks
from lathe.launch.elastic import UNGUARDED
from lathe.launch.error_reporting import explain_error
from lathe.launch.external_launch import detect_external_launch
from lathe.launch.launcher import launch_run

__all__ = ["compose", "train"]
JOB = "lathe.verbs.inside"


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """Compose and check the configuration of `python train.py <overrides>`, such as `["model=mlp", "seed=1"]`.

    Keys may be changed afterwards: `cfg.optimizer.lr = 0.1`.

    Raises:
        UserError: it is invalid; one message for each mistake.
    """
    with _restoring_process(), composing("train", _checked(overrides)) as cfg:
        resolved = resolve(cfg)
        resumes = resolved.get("resume") is not None  # a run with its own configuration
        check_command(cfg, resolved, None if resumes else launch_checks(detect_external_launch()))
        return cfg


def train(cfg: DictConfig | Sequence[str] = ()) -> Any:
    """Train as `python train.py` does, and return the run as `lathe.load` does.

    `cfg` is what `compose` returned, changed or not, or a list of overrides. A single process trains in this one;
    several devices get the same ranks as the command.

    Raises:
        UserError: the configuration is invalid, or the run failed in a way that the user can fix.
        Stopped: a signal ended the run, which can be resumed.
        KeyboardInterrupt: Ctrl-C ended it; the message says how to resume.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a process that is only starting up
        sys.exit(UNGUARDED)
    with _restoring_process():
        overrides = overrides_of(cfg) if isinstance(cfg, DictConfig) else _checked(cfg)
        importlib.import_module(JOB)  # the launch would freeze what it imports, and the notebook's objects with it
        try:
            with composing("train", overrides) as composed:
                _, path = launch_run(composed, f"{JOB}:train_inside")
        except Stopped as stop:
            if stop.signal == "SIGINT":
                raise KeyboardInterrupt(str(stop)) from None
            raise
        except Exception as error:
            explained = explain_error(error)
            if explained is None or explained is error:
                raise
            raise explained from error
        return lathe.load(path)


def _checked(overrides: Any) -> list[str]:
    is_list = isinstance(overrides, Sequence) and not isinstance(overrides, str)
    valid = is_list and all(isinstance(word, str) for word in overrides)
    require(valid, f"{overrides!r}: expected a list of overrides, such as ['model=mlp', 'seed=1'].")
    return list(overrides)


@contextmanager
def _restoring_process() -> Iterator[None]:
    """Restore what a command may change for good, because its process ends with it."""
    variables, random_state = dict(os.environ), random.getstate()  # importing Lightning draws random numbers
    in_main = threading.current_thread() is threading.main_thread()  # other threads can't set handlers
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()} if in_main else {}
    try:
        with warnings.catch_warnings():
            yield
    finally:
        random.setstate(random_state)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in variables.items() if os.environ.get(name) != value})
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:  # None: not set from Python
                signal.signal(number, handler)
