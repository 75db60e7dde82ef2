"""The resources of each job of a sweep: GPUs, or a share of the cores."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lathe.config.cpu_count import CPU_PROCESSES_PER_CORE
from lathe.errors import require


@dataclass(frozen=True)
class Slot:
    """Resources of one job: environment variables, and torch's threads (None: torch's default)."""

    variables: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None


def slots_of(jobs: int | str, trainer: Mapping[str, Any]) -> list[Slot]:
    """Return a slot for each concurrent job; raise UserError if there are too few devices."""
    asked = trainer.get("devices")
    each = asked if isinstance(asked, int) and asked > 0 else len(asked) if isinstance(asked, list) else 1
    cards = _gpus() if trainer.get("accelerator") in ("auto", "gpu", "cuda") else []
    return _on_gpus(jobs, cards, each) if cards else _on_cores(jobs, each)


def _on_gpus(jobs: int | str, cards: list[str], each: int) -> list[Slot]:
    groups = [cards[first : first + each] for first in range(0, len(cards) - each + 1, each)]
    asked = len(groups) if jobs == "auto" else int(jobs)
    held = f"{len(cards)} GPUs in groups of trainer.devices={each} hold {len(groups)} jobs at a time"
    require(0 < asked <= len(groups), f"sweep.jobs={jobs}: {held}: lower sweep.jobs, or trainer.devices.")
    return [Slot({"CUDA_VISIBLE_DEVICES": ",".join(group)}) for group in groups[:asked]]


def _on_cores(jobs: int | str, each: int) -> list[Slot]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = 1 if jobs == "auto" else int(jobs)
    most = cores * CPU_PROCESSES_PER_CORE
    require(
        count * each <= most or count == 1,
        f"sweep.jobs={jobs} of trainer.devices={each} are {count * each} processes, and {cores} cores carry at most "
        f"{most}: lower either.",
    )
    if count == 1 or "OMP_NUM_THREADS" in os.environ:
        return [Slot()] * count
    threads = max(1, cores // (count * each))
    return [Slot({"OMP_NUM_THREADS": str(threads)}, threads)] * count


def _gpus() -> list[str]:
    """Return CUDA_VISIBLE_DEVICES for each GPU, counted with NVML, after which a process can still fork."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]
