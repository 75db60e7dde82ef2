"""What costs its time again in every run that a test makes, and would give the same each time."""

import functools
import gc
import os
import pickle
import sys
from importlib import metadata
from typing import Any

from lightning.fabric.utilities import registry
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from lathe.errors import UserError
from lathe.runs import environment
from lathe.trust import safe_yaml

_parsed_again = safe_yaml._parsed


def _method_name(depth: int = 2) -> str:
    """torch's elastic agent names the method that it is in by `inspect.stack()`, which reads the sources of all callers
    and looks through all modules: under pytest half a second each time, thirty times a start."""
    return sys._getframe(depth).f_code.co_name


def _stays_in_memory(descriptor: Any) -> None:
    """Waits for no disk: a process that is killed loses nothing of what it wrote, only a machine without power does."""


@functools.lru_cache(maxsize=512)
def _pickled(data: bytes) -> bytes:
    return pickle.dumps(_parsed_again(data, ""))


def _parsed_once(data: bytes, where: str) -> Any:
    """A run's configuration is read ten times and more, by each part of a command and by each test of a run that they
    share. What can't be read is told anew each time."""
    if len(data) > 50_000:
        return _parsed_again(data, where)
    try:
        kept = _pickled(data)
    except UserError:
        return _parsed_again(data, where)
    return pickle.loads(kept)


def quick() -> None:
    """From now on in this process, and in those that are forked from it. Lightning's trainers ask every package that is
    installed for callbacks, and each run asks git for the commit and the diff and packages for their versions, which no
    test changes here. The same YAML is parsed once. Garbage is looked for less often: Python's seven hundred objects
    are made in a moment."""
    dynamic_rendezvous.get_method_name = _method_name
    registry.entry_points = functools.cache(metadata.entry_points)
    environment._git = functools.cache(environment._git)
    environment._version = functools.cache(environment._version)
    environment.describe_environment()
    safe_yaml._parsed = _parsed_once
    os.fsync = _stays_in_memory
    gc.set_threshold(50_000, 20, 20)
