"""Energy used by a process's GPUs and a machine's processors since the first reading."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lathe.measure.nvml import Gpu

POWERCAP = Path("/sys/class/powercap")
PERIOD = 1.0  # seconds between two readings


class Rapl:
    """Energy counters (RAPL) of a machine's processor packages, without memory; by default root only."""

    def __init__(self, root: Path = POWERCAP) -> None:
        self._micro, self._last = 0, dict[Path, int]()  # a package's counter at the last reading, in microjoules
        for path in sorted(root.glob("intel-rapl:*")):
            with suppress(OSError, ValueError):  # not allowed
                if (path / "name").read_text().startswith("package"):
                    self._last[path] = int((path / "energy_uj").read_text())

    @property
    def readable(self) -> bool:
        """Return whether this process can read any counter."""
        return bool(self._last)

    def joules(self) -> float:
        """Return the joules so far; exact if called more often than the counter wraps, after minutes."""
        for path, last in self._last.items():
            with suppress(OSError, ValueError):
                now = int((path / "energy_uj").read_text())
                around = int((path / "max_energy_range_uj").read_text()) if now < last else 0
                self._micro += now - last + around
                self._last[path] = now
        return self._micro / 1e6


class Meter:
    """Counts joules between `start` and `stop`, with a thread that reads every `PERIOD` seconds.

    Args:
        gpus: of this process; those without an energy counter (before Volta) are left out.
        rapl: for one process per machine.
    """

    def __init__(self, gpus: Sequence[Gpu], rapl: Rapl | None) -> None:
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._first = {gpu: joules for gpu in gpus if (joules := gpu.joules()) is not None}
        self._totals = dict.fromkeys(self._first, 0.0)
        self._rapl = rapl if rapl is not None and rapl.readable else None
        self._cpu = 0.0
        self._thread: threading.Thread | None = None

    @property
    def sees(self) -> bool:
        """Return whether there is anything to count."""
        return bool(self._first) or self._rapl is not None

    def start(self) -> None:
        """Start reading in the background."""
        if self.sees and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lathe-energy", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(PERIOD):
            self.joules()

    def stop(self) -> None:
        """Read a last time and end the thread; the counts are kept."""
        self.joules()
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def joules(self) -> dict[str, float]:
        """Return the joules so far, for those of `gpu` and `cpu` that can be counted."""
        with self._lock:
            if not self._ended.is_set():
                for gpu, first in self._first.items():
                    if (now := gpu.joules()) is not None:
                        self._totals[gpu] = now - first
                self._cpu = self._rapl.joules() if self._rapl is not None else 0.0
            gpu_joules = {"gpu": sum(self._totals.values())} if self._first else {}
            return gpu_joules | ({"cpu": self._cpu} if self._rapl is not None else {})
