"""run.log: the records of `logging` and the warnings of a run."""

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lathe.errors import UserError
from lathe.files import open_plain
from lathe.loggers.facts import HIDDEN, LOGIN, secrets_in

NAME = "run.log"


class _Plain(logging.Formatter):
    """Format a record as text, with secrets hidden."""

    def __init__(self, hidden: set[str]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        words = sorted(map(re.escape, hidden), key=len, reverse=True)
        self.hidden = re.compile("|".join([LOGIN.pattern, *words]))

    def format(self, record: logging.LogRecord) -> str:
        return self.hidden.sub(HIDDEN, super().format(record))


class _Appended(logging.FileHandler):
    """Append to a file, which must be a plain one; report a write error once."""

    told = False

    def _open(self) -> Any:
        return open_plain(Path(self.baseFilename), "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.told:
            self.told = True
            print(f"Note: {self.baseFilename} can't be written ({sys.exception()}): it ends here.", file=sys.stderr)

    def close(self) -> None:
        with suppress(OSError):  # the disk may be full
            super().close()


@contextmanager
def run_log(run_dir: Path, leaves: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Append to run.log in rank 0, until the run ends.

    It has records of `logging` (from INFO on, unless another level is set), warnings, and the error that ends the run.
    Secrets of `leaves`, the flat configuration, and of the `environment` are hidden, as in loggers.
    """
    if getattr(rank_zero_only, "rank", 0) != 0:
        yield
        return
    file = _Appended(run_dir / NAME, encoding="utf-8")
    file.setFormatter(_Plain(secrets_in(leaves, environment)))
    root = logging.getLogger()
    names = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.profilers")
    silent = [logging.getLogger(name) for name in names]
    homes = [root, *(logger for logger in silent if not logger.propagate)]
    # without handlers logging prints warnings with this one, which a file handler would replace
    shown = [] if root.handlers or logging.lastResort is None else [logging.lastResort]
    level, before = root.level, warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any, **more: Any
    ) -> None:
        before(message, category, filename, lineno, *rest, **more)
        write("warnings", logging.WARNING, f"{category.__name__}: {message} ({filename}:{lineno})")

    def write(name: str, level: int, said: str, error: BaseException | None = None) -> None:
        stack = None if error is None else (type(error), error, error.__traceback__)
        file.handle(logging.LogRecord(name, level, "", 0, said, None, stack))

    for home in homes:
        home.addHandler(file)
    for handler in shown:
        root.addHandler(handler)
    if shown and level > logging.INFO:  # the default level
        root.setLevel(logging.INFO)
    warnings.showwarning = show
    try:
        write("lathe", logging.INFO, f"process {os.getpid()} begins")
        yield
        write("lathe", logging.INFO, f"process {os.getpid()} has ended")
    except BaseException as error:
        write("lathe", logging.ERROR, str(error) or repr(error), None if isinstance(error, UserError) else error)
        raise
    finally:
        warnings.showwarning = before
        root.setLevel(level)
        for handler in shown:
            root.removeHandler(handler)
        for home in homes:
            home.removeHandler(file)
        file.close()


@contextmanager
def ended_on_error(run_dir: Path) -> Iterator[None]:
    """End the W&B run that a failed run leaves open in this process, and mark it as failed."""
    try:
        yield
    except BaseException:
        package = sys.modules.get("wandb")
        if package is not None and package.run is not None and package.run.id == run_dir.name:
            with suppress(Exception):  # the run's own error is raised
                package.finish(exit_code=1)
        raise
