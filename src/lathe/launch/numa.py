"""Bind workers to the CPUs next to their GPU, by torch's NUMA binding."""

import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

from lathe.errors import UserError, did_you_mean, require

MODES = ("none", "node", "socket", "exclusive", "auto")
NUMA_NODES = Path("/sys/devices/system/node")


def count_numa_nodes() -> int:
    """Count the NUMA nodes of this machine; 1 where the system does not list them."""
    return max(1, len(list(NUMA_NODES.glob("node[0-9]*"))))


def numa_mode(cfg: dict[str, Any], mode: str) -> str | None:
    """The mode for torch, which binds local rank r to the CPUs of GPU r; None if there is nothing to bind.

    `auto` is `node` where torch can do it, and prints its choice where there is one.

    Raises:
        UserError: an unknown mode, or one that torch can't use here.
    """
    require(mode in MODES, f"launch.numa={mode!r}: {did_you_mean(mode, MODES)}")
    if mode == "none":
        return None
    linux = sys.platform.startswith("linux")
    if mode == "auto":
        if not linux or count_numa_nodes() == 1:
            return None
        try:
            _check_binding(cfg, "node")
        except UserError as error:
            print(f"launch.numa=auto: none. {error}", flush=True)
            return None
        print("launch.numa=auto: node.", flush=True)
        return "node"
    require(linux, f"launch.numa={mode} requires Linux. Use launch.numa=none.")
    if count_numa_nodes() == 1 and mode != "exclusive":
        warnings.warn(f"launch.numa={mode} does nothing here: this machine has one NUMA node.", stacklevel=2)
        return None
    _check_binding(cfg, mode)
    return mode


def _check_binding(cfg: dict[str, Any], mode: str) -> None:
    import torch

    trainer = cfg["trainer"]
    gpus = torch.cuda.device_count() if trainer["accelerator"] in ("auto", "gpu", "cuda") else 0
    require(gpus > 0, f"launch.numa={mode} requires GPUs. Use launch.numa=none.")
    devices = trainer["devices"]
    require(
        not isinstance(devices, list) or devices == list(range(len(devices))),
        f"launch.numa={mode} binds to the first GPUs, not to trainer.devices={devices}. Use CUDA_VISIBLE_DEVICES.",
    )
    require(
        shutil.which("numactl") is not None,
        f"launch.numa={mode} requires the program numactl. Install it, or use launch.numa=none.",
    )
