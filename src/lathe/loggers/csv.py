"""metrics.csv: one line per logged step, and the same lines whether or not the run was interrupted."""

import csv
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class CSVLogger(Logger):
    """Writes figures to `path`: a column `step`, counted in optimizer steps, and one for each figure; figures of one step share a line.

    Lines are appended as they are complete. A new figure adds a column, for which the file is written anew beside itself and swapped in.
    `start_step` is where a continued run starts: later lines are dropped, since they will be written again.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        super().__init__()
        self._path = path
        self._start_step = start_step
        self._columns = ["step"]
        self._rows: list[dict[str, str]] = []  # lines that are on disk
        self._open: dict[str, str] = {}  # the line of the newest step, which may still get figures
        self._begun = False

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @property
    def log_dir(self) -> str:
        return str(self._path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: config.yaml beside the file holds them."""

    @rank_zero_only
    def begin(self) -> None:
        """Creates the file, or takes over the lines up to `start_step` of the one that is there."""
        if self._begun:
            return
        self._begun = True
        if self._start_step and self._path.exists():
            with open(self._path, newline="") as file:
                reader = csv.DictReader(file)
                self._columns = list(reader.fieldnames or ["step"])
                rows = [row for row in reader if row["step"] and None not in row.values()]  # the last line may be torn
            self._rows = [row for row in rows if int(row["step"]) <= self._start_step]
            if self._rows and int(self._rows[-1]["step"]) == self._start_step:
                self._open = {key: value for key, value in self._rows.pop().items() if value != ""}
        self._rewrite()

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.begin()
        key = str(0 if step is None else step)
        if self._open and self._open["step"] != key:
            self._close_line()
        self._open["step"] = key
        fresh = [name for name in metrics if name not in self._columns]
        self._open.update({name: _text(value) for name, value in metrics.items()})
        if fresh:
            self._columns += fresh
            self._rewrite()

    @rank_zero_only
    def save(self) -> None:
        """Nothing: complete lines are on disk already."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._begun:
            self._rewrite(self._open)  # the open line too, which a later phase (the test) may still add to

    def _close_line(self) -> None:
        with open(self._path, "a", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(self._open)
        self._rows.append(self._open)
        self._open = {}

    def _rewrite(self, unfinished: dict[str, str] | None = None) -> None:
        temporary = self._path.with_suffix(".csv.tmp")
        try:
            with open(temporary, "w", newline="") as file:
                writer = csv.DictWriter(file, self._columns, restval="")
                writer.writeheader()
                writer.writerows([*self._rows, *([unfinished] if unfinished else [])])
            os.replace(temporary, self._path)
        finally:
            temporary.unlink(missing_ok=True)


def _text(value: Any) -> str:
    return repr(value.item() if hasattr(value, "item") else value)
