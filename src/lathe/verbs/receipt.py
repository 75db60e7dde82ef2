"""Measure a finished run and compare it with the dense net."""

from pathlib import Path
from typing import Any

from lathe.errors import require
from lathe.receipt.measured import write
from lathe.runs.rundir import RunDir


def receipt(cfg: dict[str, Any]) -> dict[str, Any]:
    """Measure the requested run, and return the receipt."""
    request, run = cfg["request"], RunDir(cfg["paths"]["run_dir"])
    require(
        cfg["trainer"]["devices"] in (1, "auto"),
        f"trainer.devices={cfg['trainer']['devices']}: a receipt is measured on one device.",
    )
    run.checkpoint("best")
    baseline = Path(request["baseline"]) if request["baseline"] is not None else None
    with run.locked():
        return write(run, cfg, baseline, request["effort"])
