"""Load, temperature, memory and energy of devices."""

from collections import Counter
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from lathe.config.validation import validated
from lathe.data.steps import reached, steps_before
from lathe.errors import require
from lathe.measure.hardware import Gpu, Meter, NoNvml, Rapl, open_gpu
from lathe.measure.processes import everyones


class DeviceStats(Callback):
    """Log `device/*` of rank 0's device at every logged step, and the energy of the run.

    - GPU, by NVML: `gpu_percent` (of the time in which a kernel ran), `gpu_memory_bytes` (of all processes),
      `gpu_celsius` and `gpu_watts`, if available; by torch: `allocated_bytes` and `reserved_bytes` of this process.
    - CPU, by psutil, if training runs on it or `cpu_stats` is True: `cpu_percent` (of all cores, since the last row)
      and `memory_percent` of the machine, and `resident_bytes` of this process.

    result.json gets the joules from the first step to the end of training, if readable: `energy_gpu_j` of all ranks'
    GPUs, by their counters or by their power once a second; `energy_cpu_j` of their machines' processors by RAPL, other
    processes included. A resumed run adds those up to its checkpoint.
    """

    @validated
    def __init__(self, cpu_stats: bool | None = None) -> None:
        self.cpu_stats = cpu_stats
        self._gpus: list[Gpu] = []
        self._meter: Meter | None = None
        self._before: dict[str, float] = {}  # joules that earlier processes of the run counted
        self._total: dict[str, float] = {}  # joules of the run, once it has ended
        self._logged = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        devices = gpus_of(trainer)
        self._cpu = not devices if self.cpu_stats is None else self.cpu_stats
        require(
            bool(devices) or self._cpu,
            "callbacks.device_stats.cpu_stats=false leaves nothing to measure where training is on a CPU: leave "
            "device_stats out of callbacks, or take cpu_stats=null.",
        )
        self._gpus = []
        try:
            self._gpus = [open_gpu(device.index or 0) for device in devices]
        except NoNvml as error:
            rank_zero_warn(
                f"callbacks.device_stats logs no load, temperature, power or energy of the GPU, only torch's memory: "
                f"{error}"
            )
        if not devices:
            rank_zero_only(print)(
                "callbacks.device_stats: training is on a CPU, so it logs the machine's load and memory (psutil).",
                flush=True,
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged, self._total = 0, {}
        self._process = psutil.Process()
        psutil.cpu_percent()  # the next call covers the time since this one
        self._meter = Meter(self._gpus, Rapl() if trainer.local_rank == 0 else None)
        self._meter.start()

    def skippable_steps(self, trainer: Trainer) -> float:
        """Count the steps before the next logged one."""
        return steps_before(trainer, trainer.log_every_n_steps)  # type: ignore[attr-defined]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        step = trainer.global_step
        if (
            not interval or not reached(trainer, interval) or step == self._logged
        ):  # the same step: gradients accumulate
            return
        self._logged = step
        if trainer.is_global_zero and trainer.loggers:
            metrics = {f"device/{name}": value for name, value in self._read(trainer).items() if value is not None}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)

    def _read(self, trainer: Trainer) -> dict[str, float | None]:
        readings: dict[str, float | None] = {}
        if self._gpus:
            readings |= self._gpus[0].read()
        device = trainer.strategy.root_device
        if device.type == "cuda":
            readings |= {"allocated_bytes": float(torch.cuda.memory_allocated(device))}
            readings |= {"reserved_bytes": float(torch.cuda.memory_reserved(device))}
        if self._cpu:
            readings |= {"cpu_percent": psutil.cpu_percent(), "memory_percent": psutil.virtual_memory().percent}
            readings |= {"resident_bytes": float(self._process.memory_info().rss)}
        return readings

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._meter is not None:
            self._meter.stop()
            self._total = self._joules()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._meter is not None:
            self._meter.stop()

    def _joules(self) -> dict[str, float]:
        """Return the joules of the whole run so far, of all ranks. A collective."""
        total: Counter[str] = Counter(self._before)  # joules by device
        for joules in everyones(self._meter.joules() if self._meter is not None else {}):
            total.update(joules)
        return dict(total)

    def state_dict(self) -> dict[str, Any]:
        """Return the joules so far; a collective."""
        return {"joules": self._joules()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = dict(state_dict.get("joules", {}))

    def result_names(self, task: Any) -> tuple[str, ...]:
        """Return the names of `summary`, which are added to result.json."""
        return ("energy_gpu_j", "energy_cpu_j")

    def summary(self) -> dict[str, float]:
        """Return the run's joules, of those devices that count them."""
        return {f"energy_{name}_j": value for name, value in sorted((self._total or self._before).items())}


def gpus_of(trainer: Trainer) -> list[torch.device]:
    """Return the GPUs of this process, or all that a single-process strategy spreads a net over."""
    strategy = trainer.strategy
    several = getattr(strategy, "parallel_devices", None) if trainer.world_size == 1 else None
    return [device for device in several or [strategy.root_device] if device.type == "cuda"]
