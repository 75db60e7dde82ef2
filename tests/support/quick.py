"""Caches of work that every run repeats with the same result."""

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
from lathe.runs import rundir
from lathe.trust import safe_yaml

_parsed_again = safe_yaml.parse_yaml


def _method_name(depth: int = 2) -> str:
    """Return the caller's name for torch's elastic agent, without the slow `inspect.stack()`."""
    return sys._getframe(depth).f_code.co_name


def _stays_in_memory(descriptor: Any) -> None:
    """Skip the fsync: only a machine that loses power would lose data, a killed process does not."""


@functools.lru_cache(maxsize=512)
def _pickled(data: bytes) -> bytes:
    return pickle.dumps(_parsed_again(data, ""))


def _parsed_once(data: bytes, where: str) -> Any:
    """Cache a run's configuration, which commands and tests read ten times and more. Errors are not cached."""
    if len(data) > 50_000:
        return _parsed_again(data, where)
    try:
        kept = _pickled(data)
    except UserError:
        return _parsed_again(data, where)
    return pickle.loads(kept)


def quick() -> None:
    """Enable the caches in this process and those forked from it.

    Lightning's trainers search all packages for callbacks, and each run asks git for commit and diff, and packages for
    their versions; no test changes these. YAML is parsed once. Garbage collection is rarer.
    """
    dynamic_rendezvous.get_method_name = _method_name
    registry.entry_points = functools.cache(metadata.entry_points)
    rundir._output = functools.cache(rundir._output)
    rundir._version = functools.cache(rundir._version)
    rundir.describe_environment()
    safe_yaml.parse_yaml = _parsed_once
    os.fsync = _stays_in_memory
    gc.set_threshold(50_000, 20, 20)
