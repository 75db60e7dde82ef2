"""Read runs of other tools for a report: Lightning, TensorBoard, W&B, MLflow, and tables with a row per step.

Nothing is unpickled or built: YAML tags become text, and files above `LARGEST` bytes are not read. A run that can't be
read has failed, with the reason. Imports no torch; tensorboard and wandb only for their own files.
"""

import csv
import json
import math
import os
import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lathe.config.metric_names import lower_is_better, split_of
from lathe.config.resolve import flatten
from lathe.errors import UserError, require
from lathe.files import open_plain
from lathe.runs.run_discovery import RunEntry, RunStatus, is_sweep, runs_below
from lathe.runs.rundir import display_path
from lathe.verbs.runs.reader import Curve, Run, find_runs, finite, paths_of, printable

LARGEST = 1_000_000_000  # bytes of a file
LARGEST_TEXT = 1_000_000  # bytes of a configuration
POINTS = 10_000_000  # of a run
EVENTS = "*events.out.tfevents.*"
TABLES = (".csv", ".tsv")
DATABASES = (".db", ".sqlite", ".sqlite3")
SEEDS = {"seed_everything": "seed", "random_seed": "seed", "random_state": "seed", "fold": "data.fold"}
NOT_METRICS = ("step", "epoch", "hp_metric", "trainer/global_step", "")  # hp_metric is Lightning's placeholder
MLFLOW_STATES = {"FINISHED": "complete", "FAILED": "failed", "KILLED": "failed", "3": "complete", "4": "failed"}


@dataclass
class Record:
    """A run as its tool has recorded it: configuration by dotted key, and steps and values of each metric."""

    config: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    state: str = "complete"
    sentence: str | None = None

    def add(self, name: str, step: Any, value: Any) -> None:
        """Add a point of a metric; what is not a number is skipped."""
        with suppress(TypeError, ValueError, OverflowError):
            when, number = int(float(step)), float(value)
            if name not in NOT_METRICS and not name.startswith("_"):
                steps, values = self.curves.setdefault(printable(name), ([], []))
                require(len(steps) < POINTS, f"more than {POINTS} points of {printable(name)}")
                steps.append(when)
                values.append(number)


class OtherRun(Run):
    """A run of another tool, at `where`; its metrics are the last finite values of its curves."""

    def __init__(self, where: Path, label: str, record: Record) -> None:
        super().__init__(RunEntry(where))
        self.where, self._label, self.record = printable(display_path(where)), printable(label), record
        steps = [step for steps, _ in record.curves.values() for step in steps]
        last = {name: _last(values) for name, (_, values) in record.curves.items()}
        result = {"steps": max(steps, default=None), **last}
        state = record.state if last or record.state == "failed" else "unfinished"
        self.status = RunStatus(state, record.sentence, None, {}, [], result)
        self.leaves = {printable(str(key)): value for key, value in record.config.items()}
        for key, own in SEEDS.items():
            if key in self.leaves:
                self.leaves.setdefault(own, self.leaves.pop(key))
        if record.config or last:
            self.leaves.setdefault("seed", self._label)  # independent of all others, and in no pair
        self.sentence = None if record.sentence is None else printable(record.sentence)

    @property
    def label(self) -> str:
        return self._label

    name = label

    def curves(self, choose: Callable[[Sequence[str]], Sequence[str]]) -> dict[str, Curve]:
        return {name: self.record.curves[name] for name in choose(list(self.record.curves))}

    def command(self, seeds: Sequence[Any] = (), folds: Sequence[Any] = ()) -> str:
        return ""  # its tool does not record one that can be repeated


def _last(values: Sequence[float]) -> float | None:
    return next((value for value in reversed(values) if math.isfinite(value)), values[-1] if values else None)


def find_all_runs(named: str | Sequence[str]) -> list[Run]:
    """Return the runs at or below paths or patterns, as `find_runs`; of other tools where Lathe has none."""
    patterns, others, lathes = [named] if isinstance(named, str) else named, list[Run](), list[str]()
    for pattern in patterns:
        paths = [path for path in paths_of(pattern) if path.is_file() or not (is_sweep(path) or any(runs_below(path)))]
        runs = [run for path in paths for run in runs_of_tools(path)]
        others += runs
        lathes += [] if runs else [pattern]
    unique = {(run.where, run.label): run for run in others}
    return [*(find_runs(lathes) if lathes else []), *unique.values()]


def runs_of_tools(path: Path) -> Iterator[Run]:
    """Yield the runs in a file, or in a folder and its subfolders; links are not followed."""
    if path.is_file():
        if path.suffix in DATABASES:
            yield from _mlflow_database(path)
        elif path.suffix in TABLES:
            yield from _table(path)
        return
    for root, folders, names in os.walk(path):
        folder = Path(root)
        folders[:] = sorted(name for name in folders if name[0] != ".")  # .trash is MLflow's
        databases = [folder / name for name in sorted(names) if Path(name).suffix in DATABASES]
        reader: Callable[[Path], Record] | None = None
        if any(folder.glob("run-*.wandb")):
            reader = _wandb
        elif (folder / "metrics.csv").is_file():
            reader = _lightning
        elif any(folder.glob(EVENTS)):
            reader = _tensorboard
        elif (folder / "meta.yaml").is_file() and (folder / "metrics").is_dir():
            reader = _mlflow
        if reader is not None:
            try:
                record = reader(folder)
            except ModuleNotFoundError as error:
                raise UserError(f"runs: {folder} needs the package {error.name}: pip install {error.name}.") from error
            except Exception as error:  # a damaged or hostile file may raise anything
                message = " ".join(str(error).split())[:200]
                record = Record(state="failed", sentence=f"its files can't be read: {message}")
            yield OtherRun(folder, folder.relative_to(path.parent).as_posix(), record)
        for file in databases if reader is None else ():
            yield from _mlflow_database(file)
        if reader is not None or databases:
            folders.clear()


def _checked(path: Path, largest: int = LARGEST) -> Path:
    with open_plain(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
    require(size <= largest, f"{path.name} has {size} bytes, and at most {largest} are read")
    return path


# Lightning's CSVLogger, and the hparams.yaml of all its loggers


def _lightning(folder: Path) -> Record:
    record = Record(_hparams(folder))
    for row in _rows(folder / "metrics.csv"):
        for name, value in row.items():
            record.add(name, row.get("step"), value)
    return record


def _rows(path: Path) -> Iterator[dict[str, str]]:
    try:
        with open_plain(_checked(path), newline="", encoding="utf-8-sig") as file:
            for row in csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","):
                yield {name: value for name, value in row.items() if name is not None and isinstance(value, str)}
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"runs={path}: it can't be read as a table: {error}") from error


class _Loader(yaml.SafeLoader):
    """Reads what Lightning writes: a Python object becomes its class's name, and a repeated one text."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):  # expanded, a few lines could fill the memory
            return yaml.ScalarNode("tag:yaml.org,2002:str", f"*{self.get_event().anchor}")
        return super().compose_node(parent, index)


_Loader.add_multi_constructor("", lambda loader, tag, node: tag.rpartition(":")[2] or str(node.value))


def _hparams(folder: Path) -> dict[str, Any]:
    path = folder / "hparams.yaml"
    content = _yaml(path) if path.is_file() else {}
    return flatten(content) if isinstance(content, dict) and content else {}


def _yaml(path: Path) -> Any:
    with open_plain(_checked(path, LARGEST_TEXT), encoding="utf-8") as file:
        return yaml.load(file, Loader=_Loader)  # noqa: S506  # a SafeLoader


def _value(text: str) -> Any:
    """Return a value that a tool has saved as text: a number, true, false or null where it reads as one."""
    with suppress(ValueError):
        return float(text) if not text.strip("+-").isdigit() else int(text)
    return {"True": True, "true": True, "False": False, "false": False, "None": None}.get(text, text)


# TensorBoard


def _tensorboard(folder: Path) -> Record:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from tensorboard.util.tensor_util import make_ndarray

    record, kinds = Record(_hparams(folder)), dict[str, str]()
    for path in sorted(folder.rglob(EVENTS)):
        _checked(path)
        below = "" if path.parent == folder else f"{path.parent.relative_to(folder).as_posix()}/"
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                plugin = value.metadata.plugin_data
                kind = kinds.setdefault(f"{path}/{value.tag}", plugin.plugin_name)
                if kind == "hparams" and value.tag == "_hparams_/session_start_info":
                    start = HParamsPluginData.FromString(plugin.content).session_start_info
                    for key, param in start.hparams.items():
                        record.config.setdefault(key, getattr(param, param.WhichOneof("kind") or "string_value"))
                elif kind == "scalars" and not value.tensor.tensor_shape.dim:
                    # add_hparams and add_scalars write into folders below the run's
                    name = value.tag if not below or value.tag not in record.curves else f"{below}{value.tag}"
                    record.add(name, event.step, make_ndarray(value.tensor).item())
    return record


# W&B


def _wandb(folder: Path) -> Record:
    from wandb.proto import wandb_internal_pb2

    record, summary = Record(state="unfinished"), dict[str, Any]()
    for data in _log_records(_checked(next(folder.glob("run-*.wandb"))).read_bytes()):
        entry = wandb_internal_pb2.Record.FromString(data)
        kind = entry.WhichOneof("record_type")
        if kind in ("run", "config"):
            for item in (entry.run.config if kind == "run" else entry.config).update:
                record.config |= flatten(json.loads(item.value_json), _key(item))
        elif kind == "history":
            row = {_key(item): json.loads(item.value_json) for item in entry.history.item}
            for name, value in row.items():
                record.add(name, row.get("_step", entry.history.step.num), value)
        elif kind == "summary":
            summary |= {_key(item): json.loads(item.value_json) for item in entry.summary.update}
        elif kind == "exit":
            record.state = "failed" if entry.exit.exit_code else "complete"
    for name, value in summary.items():  # what was put into the summary alone, after training
        if finite(value) is not None and name not in record.curves:
            record.add(name, 0, value)
    record.config = {key: value for key, value in record.config.items() if not key.startswith("_wandb")}
    return record


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def _log_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log, in blocks of 32 KiB, after W&B's header of 7 bytes; ends where it is cut."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if at > len(data) or kind == 0:
            return
        if kind in (1, 4):  # the whole of a record, or its last part
            yield parts
            parts = b""


# MLflow


def _mlflow(folder: Path) -> Record:
    about = _yaml(folder / "meta.yaml")
    record = Record(state=MLFLOW_STATES.get(str(about.get("status")), "unfinished"))
    for name, path in _files_below(folder / "params"):
        record.config[name] = _value(_checked(path, LARGEST_TEXT).read_text())
    for name, path in _files_below(folder / "metrics"):
        for line in _checked(path).read_text().splitlines():
            _, value, step, *_ = [*line.split(), "0"]
            record.add(name, step, value)
    return record


def _files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    yield from ((path.relative_to(folder).as_posix(), path) for path in sorted(folder.rglob("*")) if path.is_file())


def _mlflow_database(path: Path) -> Iterator[Run]:
    """Yield the runs of an MLflow database; none if it is not one."""
    runs, labels = dict[str, Record](), dict[str, str]()
    with closing(sqlite3.connect(f"{_checked(path).absolute().as_uri()}?mode=ro", uri=True)) as base:
        try:
            base.execute("PRAGMA trusted_schema = OFF")
            tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not {"runs", "params", "metrics"} <= tables:  # a view could compute without end
                return
            for run, name, status in base.execute(
                "SELECT run_uuid, name, status FROM runs WHERE lifecycle_stage = 'active' ORDER BY start_time"
            ):
                runs[run] = Record(state=MLFLOW_STATES.get(str(status), "unfinished"))
                labels[run] = f"{name or 'run'} {str(run)[:8]}"
            for run, key, text in base.execute("SELECT run_uuid, key, value FROM params ORDER BY key"):
                if run in runs:
                    runs[run].config[str(key)] = _value(str(text))
            for run, key, step, value, is_nan in base.execute(
                "SELECT run_uuid, key, step, value, is_nan FROM metrics ORDER BY key, step, timestamp"
            ):
                if run in runs:
                    runs[run].add(str(key), step, math.nan if is_nan else value)
        except sqlite3.DatabaseError as error:
            raise UserError(f"runs={path}: it can't be read as an MLflow database: {error}") from error
    for run, record in runs.items():
        yield OtherRun(path, labels[run], record)


# a table


def _table(path: Path) -> Iterator[Run]:
    """Yield a run for each value of the column `run`; `step` is its step.

    A column is a metric if it changes within a run, or if its name has a split or is that of a loss or an accuracy.
    All others are the configuration.
    """
    groups: dict[str, list[dict[str, str]]] = {}
    for row in _rows(path):
        require("run" in row and "step" in row, f"runs={path}: a table needs the columns run and step.")
        groups.setdefault(row.pop("run"), []).append(row)
    names = list(dict.fromkeys(name for rows in groups.values() for row in rows for name in row if name != "step"))
    metrics = set[str]()
    for name in names:
        changes = any(len({row[name] for row in rows if row.get(name)}) > 1 for rows in groups.values())
        named = split_of(name) is not None or lower_is_better(name) or "acc" in name.lower()
        if named or (changes and name not in ("seed", *SEEDS)):
            metrics.add(name)
    for label, rows in groups.items():
        record = Record({name: _value(rows[-1].get(name, "")) for name in names if name not in metrics})
        for row in rows:
            for name in metrics & row.keys():
                record.add(name, row["step"], row[name])
        yield OtherRun(path, label, record)
