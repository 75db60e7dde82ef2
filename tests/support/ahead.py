"""What the server of `processes.py` does once for all commands that it forks: it composes the usual run, so that they
find its files read, and puts all that it knows where their collections of garbage don't walk: a page of memory that a
forked process writes to is copied.
"""

import atexit
import gc
import os
import sys
import weakref

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from torch._dynamo.utils import dump_compile_times

from lathe.config.resolve import resolve
from lathe.runs.build import make_task
from support import composing, quick
from support.runs import ROOT


def _compose_and_build() -> None:
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        make_task(resolve(compose("train", overrides=["model=mlp", "seed=1"])))
        GlobalHydra.instance().hydra.get_mode("train", ["model=mlp"])
    GlobalHydra.instance().clear()


def _forget_the_way_here() -> None:
    """What the server was given to find this module, which no command is to have."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[:] = [path for path in sys.path if path != here]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path != here
    )


def _leave_at_once() -> None:
    """At each end torch takes its operators out of a dispatcher that ends as well, and adds up, for a log that nobody
    hears, what it compiled: a tenth of a short command."""
    atexit.unregister(dump_compile_times)
    for finalizer, kept in weakref.finalize._registry.items():  # type: ignore[attr-defined]
        if kept.func is torch.library._del_library:
            finalizer.atexit = False


composing.once()
quick.quick()
_leave_at_once()
_compose_and_build()
_forget_the_way_here()
gc.collect()
gc.freeze()
gc.enable()
