"""Binding workers to the CPUs beside their GPU, through torch's own NUMA binding."""

import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

from lathe.errors import UserError, did_you_mean, require

MODES = ("none", "node", "socket", "exclusive", "auto")
SYSTEM = Path("/sys/devices/system/node")


def count_numa_nodes() -> int:
    """How many NUMA nodes this machine has; 1 where the system does not say."""
    return max(1, len(list(SYSTEM.glob("node[0-9]*"))))


def numa_mode(cfg: dict[str, Any], mode: str) -> str | None:
    """The mode to bind in, or None where there is nothing to bind. torch binds the worker of local rank r to the CPUs
    of GPU r. `auto` is node where torch can follow it, and says which it took where there is a choice.

    Raises:
        UserError: an unknown mode, or one that torch can't follow here.
    """
    require(mode in MODES, f"launch.numa={mode!r}: {did_you_mean(mode, MODES)}")
    if mode == "none":
        return None
    linux = sys.platform.startswith("linux")
    if mode == "auto":
        if not linux or count_numa_nodes() == 1:
            return None
        try:
            _check(cfg, "node")
        except UserError as error:
            print(f"launch.numa=auto took none: {error}", flush=True)
            return None
        print("launch.numa=auto took node.", flush=True)
        return "node"
    require(linux, f"launch.numa={mode} needs Linux: use launch.numa=none.")
    if count_numa_nodes() == 1 and mode != "exclusive":
        warnings.warn(f"launch.numa={mode} does nothing here: this machine has one NUMA node.", stacklevel=2)
        return None
    _check(cfg, mode)
    return mode


def _check(cfg: dict[str, Any], mode: str) -> None:
    """Refuses what torch can't bind."""
    import torch

    trainer = cfg["trainer"]
    gpus = torch.cuda.device_count() if trainer["accelerator"] in ("auto", "gpu", "cuda") else 0
    beside = f"launch.numa={mode} binds the worker of local rank r to the CPUs beside GPU r"
    require(gpus > 0, f"{beside}, and this run uses no GPU: use launch.numa=none, or numactl around the command.")
    devices = trainer["devices"]
    in_order = not isinstance(devices, list) or devices == list(range(len(devices)))
    require(in_order, f"{beside}, and trainer.devices={devices} picks others: choose GPUs with CUDA_VISIBLE_DEVICES.")
    there = shutil.which("numactl") is not None
    require(
        there,
        f"launch.numa={mode}: torch asks for the program numactl, which is not here: install it, or use "
        "launch.numa=none.",
    )
