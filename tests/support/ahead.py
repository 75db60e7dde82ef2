"""Preparation of the server of `processes.py`, once for all forked commands.

It composes the usual run, so that its files are cached, and freezes all objects out of garbage collection, which would
write to shared memory pages and so copy them.
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
    """Remove the path that the server needed to find this module."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[:] = [path for path in sys.path if path != here]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path != here
    )


def _leave_at_once() -> None:
    """Disable torch's slow exit handlers, which unregister operators and log compile times."""
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
