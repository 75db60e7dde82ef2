"""Export a run to a file and its manifest, for export.py and for receipts."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lathe import export, measure
from lathe.errors import UserError, require, under
from lathe.export import manifest as manifests
from lathe.runs.export_model import ExportModel, open_export_model
from lathe.runs.export_staleness import KEY, checkpoint_hash
from lathe.runs.rundir import open_run
from lathe.verbs.export.request import taken


def ready_for(
    name: str,
    options: Mapping[str, Any],
    run: Path,
    *,
    checkpoint: str = "best",
    preprocess: bool = True,
    input_size: Any = None,
    eval_batch_size: int | None = None,
    data_folder: str | None = None,
) -> ExportModel:
    """Build the module that target `name` exports: integer or float, with preprocessing."""
    target = export.get(name)
    missing = target.available(**taken(target.available, options))
    require(missing is None, str(missing))
    path = open_run(run, "run").checkpoint(checkpoint, "checkpoint")
    held = checkpoint_hash(path)  # before it is read: training may replace the file in between
    ready = open_export_model(
        run,
        checkpoint=checkpoint,
        preprocess=preprocess and target.computes,
        input_size=input_size if target.computes else None,
        integers=options.get("integers") if target.integers is None else target.integers,
        eval_batch_size=eval_batch_size,
        data_folder=data_folder,
    )
    ready.facts[KEY] = held
    return ready


def make(ready: ExportModel, name: str, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the file of target `name` and its manifest into `folder`, and return the manifest."""
    target = export.get(name)
    file = f"model{target.suffix}"
    facts = {
        "target": name,
        "file": file,
        **ready.facts,
        "options": dict(options),
        "exported": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": measure.versions(),
    }
    if hasattr(target, "made_for"):
        facts |= target.made_for(**taken(target.made_for, options))
    given = taken(target.export, {"facts": facts, "config": ready.cfg["model"].get("net")})
    own = {option: value for option, value in options.items() if option != "integers"}  # already applied to `ready`
    try:
        with silent(), under(f"target.{name}"):
            target.export(ready.net, ready.example, folder / file, **own, **given)
    except (UserError, OSError):
        raise
    except Exception as error:  # any error of a tracer or a compiler
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
        raise UserError(
            f"target={name} can't take this net ({type(error).__name__}: {lines[0][:200].rstrip('.')}): choose another "
            "target; HYDRA_FULL_ERROR=1 shows where."
        ) from error
    manifests.write(folder, facts, files_in(folder))
    return facts


def files_in(folder: Path) -> list[str]:
    """Return the names of an export's files, without its manifest."""
    return sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != manifests.NAME)


@contextmanager
def silent() -> Iterator[None]:
    """Disable logging up to INFO: exporters log every pass over a graph."""
    was = logging.root.manager.disable
    logging.disable(max(was, logging.INFO))
    try:
        yield
    finally:
        logging.disable(was)
