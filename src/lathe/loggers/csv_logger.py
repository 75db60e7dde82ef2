"""metrics.csv: one line per logged step, the same lines whether or not the run was interrupted."""

import codecs
import csv as csv_files
import io
import math
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lathe.errors import UserError, naming
from lathe.files import open_plain, require_plain, whole

PERIOD = 0.2  # least seconds between two writes


@dataclass
class Lines:
    """The `text` of a metrics.csv and its `rows` by column; all empty if the file is missing or empty."""

    text: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[dict[str, str]] = field(default_factory=list)


def read_lines(path: Path) -> Lines:
    """Read a metrics.csv, without a truncated last line, trailing null bytes and a byte order mark.

    Raises:
        UserError: the text is not UTF-8 or not CSV, or a line has no step.
        NotPlain: `path` is not a plain file.
    """
    try:
        with open_plain(path, "rb") as file:
            data = file.read().rstrip(b"\0")
    except FileNotFoundError:
        return Lines()
    data = data[: data.rfind(b"\n") + 1].removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode()
        reader = csv_files.DictReader(io.StringIO(text, newline=""), restval="")
        rows = list(reader)
        for row in rows:
            int(row["step"])
    except (UnicodeDecodeError, csv_files.Error, KeyError, ValueError) as error:
        raise UserError(f"{path} can't be read ({error}): mend that line, or move the file away.") from error
    return Lines(text, list(reader.fieldnames or []), rows)


def numbers(path: Path, lines: Lines) -> list[dict[str, float]]:
    """Return the rows of `lines`, read from `path`, as numbers, without metrics that a step did not log."""
    rows: list[dict[str, float]] = []
    for row in lines.rows:
        try:
            rows.append({name: float(value) for name, value in row.items() if value} | {"step": int(row["step"])})
        except ValueError as error:
            raise UserError(f"{path}: a value at step {row['step']} is not a number ({error}).") from error
    return rows


class Discarded:
    """An `experiment` that takes calls of any name and discards them, with the `reason` printed at the first one."""

    def __init__(self, reason: str) -> None:
        self._reason: str | None = reason

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._discard

    def __getitem__(self, index: int) -> "Discarded":
        return self

    def _discard(self, *args: Any, **kwargs: Any) -> None:
        if self._reason is not None:
            rank_zero_only(print)(f"{self._reason}: what is given to logger.experiment is not kept.", flush=True)
            self._reason = None


class Discard(DummyLogger):
    """Discard what a module logs."""

    def __init__(self) -> None:
        super().__init__()
        self._experiment = Discarded("This command has no logger")  # type: ignore[assignment]


class CSVLogger(Logger):
    """Write metrics to `path`: a column `step` in optimizer steps, and one for each metric.

    Metrics of a step share a line; that of the newest step is rewritten if more follow. Lines are written a few times a
    second, and all of them by `save`, which a checkpoint calls. A new column, or a metric of an earlier step, rewrites
    the file atomically. `start_step` is the start of a resumed run: later lines are dropped, since they will be
    repeated. Existing lines are read at once, to report damage (UserError, NotPlain) before training.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        super().__init__()
        self._path = path
        self._discarded = Discarded("metrics.csv keeps the numbers of self.log only")
        self._start_step = start_step
        self._columns = ["step"]
        self._open: dict[str, str] = {}  # the newest step's metrics
        self._offset = 0  # byte offset of its line in the file
        self._begun = False
        self._closed: list[dict[str, str]] = []  # earlier lines that are not on disk
        self._saved = -math.inf
        self._kept: Lines | None = None  # of a resumed run
        if getattr(rank_zero_only, "rank", 0) == 0:
            if start_step:
                self._kept = read_lines(path)
            else:
                require_plain(path)

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @property
    def experiment(self) -> Any:
        """Lightning's name for the writer of a logger; metrics.csv keeps only what `self.log` writes."""
        return self._discarded

    @property
    def log_dir(self) -> str:
        return str(self._path.parent)

    @property
    def save_dir(self) -> str:
        return self.log_dir

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml has the hyperparameters."""

    @rank_zero_only
    def begin(self) -> None:
        """Create the file, or keep the lines up to `start_step` of an existing one."""
        if self._begun:
            return
        self._begun = True
        if self._kept is not None and not self._kept.columns:
            print(
                f"Note: {self._path} is not there, or empty: the lines up to step {self._start_step} are gone.",
                file=sys.stderr,
                flush=True,
            )
        elif self._kept is not None:
            self._columns = self._kept.columns
        rows = [] if self._kept is None else self._kept.rows
        self._kept = None
        self._rewrite([row for row in rows if int(row["step"]) <= self._start_step])

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if not self._begun:
            self.begin()
        key = str(0 if step is None else step)
        if self._open and self._open["step"] != key and int(key) < int(self._open["step"]):
            self._write_earlier(int(key), metrics)
            return
        if self._open and self._open["step"] != key:
            self._closed.append(self._open)
            self._open = {}
            if monotonic() - self._saved > PERIOD:
                self.save()
        self._open["step"] = key
        fresh = [name for name in metrics if name not in self._columns]
        self._open.update({name: _text(value) for name, value in metrics.items()})
        if fresh:
            self.save()
            rows = self._read()
            self._columns += fresh
            self._rewrite([*rows[:-1], self._open])

    def _write_earlier(self, step: int, metrics: dict[str, float]) -> None:
        self.save()
        rows = self._read()
        index = sum(int(row["step"]) < step for row in rows)
        if int(rows[index]["step"]) != step:
            rows.insert(index, {"step": str(step)})
        rows[index].update({name: _text(value) for name, value in metrics.items()})
        self._columns += [name for name in metrics if name not in self._columns]
        self._rewrite(rows)

    @rank_zero_only
    def save(self) -> None:
        """Write all lines to disk."""
        self._saved = monotonic()
        if not self._closed and not self._open:
            return
        text = io.StringIO(newline="")
        writer = csv_files.DictWriter(text, self._columns, restval="", extrasaction="ignore")
        writer.writerows(self._closed)
        opens = self._offset + len(text.getvalue().encode())
        if self._open:
            writer.writerow(self._open)
        with naming(self._path):
            self._put(text.getvalue().encode())
        self._offset, self._closed = opens, []

    def _put(self, data: bytes) -> None:
        """Write `data` at the open line, by appending or replacing the file, so that a kill loses no line."""
        with open_plain(self._path, "r+b", buffering=0) as file:
            file.seek(self._offset)
            old = file.read()
            if data.startswith(old):
                rest = data[len(old) :]
                try:
                    while rest:  # a disk that fills up may accept a part before the error
                        rest = rest[file.write(rest) :]
                except OSError:
                    file.truncate(self._offset + len(old))
                    raise
                return
            file.seek(0)
            head = file.read(self._offset)
        with whole(self._path) as temporary:
            temporary.write_bytes(head + data)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._begun:
            self.save()

    def _read(self) -> list[dict[str, str]]:
        lines = read_lines(self._path)
        self._columns = lines.columns or ["step"]
        return lines.rows

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        """Write all lines; the last stays open."""
        with whole(self._path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv_files.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows[:-1])
            self._offset = file.tell()
            writer.writerows(rows[-1:])
        self._open = {key: value for key, value in rows[-1].items() if value} if rows else {}


def _text(value: Any) -> str:
    return repr(value.item() if hasattr(value, "item") else value)


def csv(run_dir: Path, start_step: int) -> Logger:
    """metrics.csv, without the lines after `start_step` of an interrupted run, which will be repeated."""
    return CSVLogger(run_dir / "metrics.csv", start_step)
