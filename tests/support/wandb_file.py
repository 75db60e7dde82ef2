"""Reads W&B's offline files."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK, HEADER, FULL, LAST = 32768, 7, 1, 4  # LevelDB's log format, after the file's header


@dataclass
class Written:
    """The records of a run; `run` is that of the run itself."""

    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    run: Any = None
    artifacts: list[str] = field(default_factory=list)


def records(data: bytes) -> Iterator[bytes]:
    place, parts = HEADER, b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + HEADER])
        parts += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def read_wandb(run_dir: Path) -> Written:
    """Read the newest run in `run_dir`."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = Written()
    for data in records(max(run_dir.glob("wandb/offline-run-*/run-*.wandb")).read_bytes()):
        record = Record.FromString(data)
        config = list(record.config.update)
        if record.HasField("run"):
            found.run = record.run
            config += record.run.config.update
        found.config |= {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in config}
        found.summary |= {
            item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.summary.update
        }
        for part in (record.artifact, record.request.log_artifact.artifact):
            found.artifacts += [part.name] if part.name else []
    return found
