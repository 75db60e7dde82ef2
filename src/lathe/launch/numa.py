"""Bind workers to the CPUs next to their GPU, by torch's NUMA binding."""

import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

from lathe.errors import UserError

NUMA_NODES = Path("/sys/devices/system/node")


def count_numa_nodes() -> int:
    """Count the NUMA nodes of this machine; 1 where the system does not list them."""
    return max(1, len(list(NUMA_NODES.glob("node[0-9]*"))))


def numa_mode(cfg: dict[str, Any], mode: str) -> str | None:
    """The mode for torch, which binds local rank r to the CPUs of GPU r; None if there is nothing to bind.

    `auto` is `node` where torch can do it, and prints its choice on a machine with several NUMA nodes.

    Raises:
        UserError: a mode that torch can't use here.
    """
    has_one_node = count_numa_nodes() == 1
    if mode == "none" or (mode == "auto" and has_one_node):
        return None
    if has_one_node and mode != "exclusive" and sys.platform.startswith("linux"):
        warnings.warn(f"launch.numa={mode} does nothing here: this machine has one NUMA node.", stacklevel=2)
        return None
    missing = _missing(cfg)
    if mode == "auto":
        print(f"launch.numa=auto: {f'none, as it requires {missing}' if missing else 'node'}.", flush=True)
        return None if missing else "node"
    if missing:
        raise UserError(f"launch.numa={mode} requires {missing}. Use launch.numa=none.")
    return mode


def _missing(cfg: dict[str, Any]) -> str | None:
    """Return what the binding lacks, or None."""
    if not sys.platform.startswith("linux"):
        return "Linux"
    import torch

    trainer = cfg["trainer"]
    if trainer["accelerator"] not in ("auto", "gpu", "cuda") or not torch.cuda.device_count():
        return "GPUs"
    devices = trainer["devices"]
    if isinstance(devices, list) and devices != list(range(len(devices))):
        return f"the first GPUs, not trainer.devices={devices} (CUDA_VISIBLE_DEVICES can choose them)"
    return None if shutil.which("numactl") else "the program numactl"
