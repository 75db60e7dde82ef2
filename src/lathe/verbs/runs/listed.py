"""A row of the list of runs, read lazily, so that a thousand runs are listed quickly."""

import csv
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from lathe.config.resolve import flatten
from lathe.files import open_plain
from lathe.runs.metric_names import objective_name
from lathe.runs.run_status import RunStatus, is_busy, is_locked, read_status, seconds_since_write, status_without_run
from lathe.runs.rundir import RunDir, display_path


class Listed:
    """A run directory, or a sweep's `job` without one; `known` caches configurations (RunDir.plain)."""

    def __init__(
        self,
        path: Path | None,
        job: dict[str, Any] | None = None,
        where: Path | None = None,
        known: dict[str, Any] | None = None,
    ) -> None:
        self.path, self.job = path, job or {}
        self._where, self._known = where or path, known
        self.run = RunDir(path if path is not None else Path(os.devnull), self.where)

    @property
    def where(self) -> str:
        """Its path, relative to the working directory if below it; for a job without a run, its file."""
        return display_path(Path(str(self._where)))

    @property
    def name(self) -> str:
        """The label of the run."""
        return self.path.parent.name if self.path is not None else str(self.job.get("name", ""))

    @cached_property
    def started(self) -> datetime:
        """The start time; for a job without a run, the time of its file."""
        if self.path is not None:
            return self.run.started
        with suppress(OSError):
            return datetime.fromtimestamp(Path(str(self._where)).stat().st_mtime, UTC)
        return datetime.fromtimestamp(0, UTC)

    @property
    def date(self) -> str:
        """The start in local time, as 2026-11-20 18:00:00."""
        return f"{self.started.astimezone():%Y-%m-%d %H:%M:%S}"

    @cached_property
    def standing(self) -> RunStatus:
        """Its status and the contents of its files, from which nothing is built."""
        return status_without_run(None, self.job) if self.path is None else read_status(self.run, self.job, self._known)

    @property
    def state(self) -> str:
        """One of `STATES`."""
        return self.standing.state

    @property
    def result(self) -> Mapping[str, Any]:
        """The contents of result.json; empty if it can't be read."""
        return self.standing.result or {}

    @property
    def busy(self) -> bool:
        """True if a live process has the run, or is about to."""
        assert self.path is not None
        return is_locked(self.path) or (not self.run.complete and is_busy(self.path))

    @property
    def age(self) -> float:
        """Seconds since the last write in the run directory."""
        assert self.path is not None
        return seconds_since_write(self.path)

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration, not to be built; empty if it can't be read."""
        return self.standing.config or {}

    @cached_property
    def leaves(self) -> dict[str, Any]:
        """The configuration by dotted keys."""
        return flatten(dict(self.config)) if self.config else {}

    @cached_property
    def typed(self) -> list[str]:
        """The overrides that it was started with."""
        typed = self.standing.overrides if self.path is not None else self.job.get("overrides")
        return [str(word) for word in typed] if isinstance(typed, list) else []

    @cached_property
    def tags(self) -> list[str]:
        """The tags."""
        found = self.result.get("tags", []) if self.result else self.config.get("tags")
        return [str(word) for word in found] if isinstance(found, list) else []

    @property
    def seed(self) -> Any:
        """The seed."""
        return self.result["seed"] if "seed" in self.result else self.config.get("seed")

    @cached_property
    def objective(self) -> tuple[str, float | None]:
        """The name and value of the objective."""
        value = self.result.get("objective", self.job.get("objective"))
        return objective_name(self.result, self.typed), value if isinstance(value, (int, float)) and math.isfinite(
            value
        ) else None

    @cached_property
    def steps(self) -> int | None:
        """The number of optimizer steps that are recorded."""
        found = self.result.get("steps")
        return found if isinstance(found, int) else self._last_step

    @property
    def _last_step(self) -> int | None:
        place, damaged = self.run.path / "metrics.csv", (OSError, ValueError, IndexError, StopIteration, csv.Error)
        with suppress(*damaged), open_plain(place, "rb") as file:
            at = next(csv.reader([file.readline(65536).decode("utf-8-sig")])).index("step")
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 65536))
            lines = [line for line in file.read().rstrip(b"\0").decode(errors="replace").splitlines() if line.strip()]
            return int(next(csv.reader([lines[-1]]))[at])
        return None

    @cached_property
    def size(self) -> int:
        """Bytes of all its files."""
        return _bytes_in(str(self.path)) if self.path is not None else 0

    def value(self, key: str) -> Any:
        """Return the column, metric or configuration value at `key`; None if there is none."""
        if key in COLUMNS:
            found = getattr(self, key)
            return found[1] if key == "objective" else found
        if key in self.result:
            return self.result[key]
        found = next((word.partition("=")[2] for word in self.typed if word.partition("=")[0] == key), None)
        return self.leaves.get(key, found)

    def keys(self) -> Iterator[str]:
        """Yield every key that `value` accepts."""
        yield from COLUMNS
        yield from self.result
        yield from self.leaves
        yield from (word.partition("=")[0] for word in self.typed)


COLUMNS = ("name", "date", "state", "seed", "tags", "objective", "steps", "size")


def _bytes_in(folder: str) -> int:
    total = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                is_folder = entry.is_dir(follow_symlinks=False)
                total += _bytes_in(entry.path) if is_folder else entry.stat(follow_symlinks=False).st_size
    return total
