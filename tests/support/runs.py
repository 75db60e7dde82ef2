"""Composed configurations, runs in this process, and the content of run directories."""

import csv
import glob
from pathlib import Path
from typing import Any

import torch
from hydra import initialize_config_dir

from lathe.config.resolve import resolve
from lathe.runs import rundir
from support.composing import compose

ROOT = Path(__file__).parents[2]
QUIET = ("trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false")
SMALL = (
    "model=mlp",
    "model.net.width=16",
    "model.net.depth=1",
    *QUIET,
    "trainer.max_epochs=2",
    "data.batch_size=64",
    "trainer.log_every_n_steps=5",
)


def config(*overrides: str, name: str = "train") -> dict[str, Any]:
    """Return the resolved configuration of these overrides, as ranks get it."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return resolve(compose(name, list(overrides)))


def new_run(log_dir: Path, *overrides: str) -> dict[str, Any]:
    """Return a configuration with a new run directory in `log_dir`."""
    cfg = config(*overrides, f"paths.log_dir={log_dir}")
    del cfg["sweep"]  # not part of a run
    rundir.create(log_dir, cfg, list(overrides))
    return cfg


def request(run: rundir.RunDir, command: str, *overrides: str) -> dict[str, Any]:
    """Return what a command on a finished run passes to its job."""
    command_cfg = config(f"run={run.path}", *overrides, name=command)
    cfg = run.config
    cfg["trainer"] |= command_cfg["trainer"]
    cfg["paths"]["run_dir"] = str(run.path)
    return {**cfg, "strategy": command_cfg["strategy"], "request": command_cfg}


def runs(log_dir: Path) -> list[Path]:
    """Return all run directories in `log_dir`, oldest first, also if they began in the same second."""

    def began(path: Path) -> tuple[str, int, str]:
        facts = path / "environment.json"
        return path.name[:19], facts.stat().st_mtime_ns if facts.exists() else 0, path.name

    # pathlib's glob fails if a name vanishes
    paths = map(Path, glob.glob(f"{glob.escape(str(log_dir))}/*/*/config.yaml"))
    found = [path.parent for path in paths if not path.parent.is_symlink()]
    return sorted(found, key=began)


def weights(run_dir: Path, name: str = "last") -> dict[str, torch.Tensor]:
    """Return the weights in a checkpoint of a run."""
    return dict(torch.load(run_dir / "checkpoints" / f"{name}.ckpt", weights_only=True)["state_dict"])


def rows(run_dir: Path) -> list[dict[str, str]]:
    """Return the lines of metrics.csv."""
    with open(run_dir / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def column(run_dir: Path, name: str) -> list[float]:
    """Return one column of metrics.csv as numbers."""
    return [float(row[name]) for row in rows(run_dir) if row.get(name)]
