"""The jobs of sweeps, as their files say: a run below logs may be one. Imports no torch."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lathe.errors import UserError
from lathe.trust import read_json


def jobs(sweep: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files of a sweep's jobs, in order, and what each says; those that can't be read are passed over."""
    for path in sorted((sweep / "jobs").glob("*.json")):
        with suppress(UserError, OSError):
            yield path, read_json(path, str(path))
