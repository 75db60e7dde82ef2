"""Jobs for the elastic agent: workers import them by name."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lathe.config.schema import key_schemas
from lathe.errors import Stopped, UserError


def _rank() -> int:
    return int(os.environ.get("RANK", "-1"))


def describe(cfg: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's environment; each rank also leaves a file."""
    Path(cfg["folder"], f"rank{_rank()}").touch()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_MAX_RESTARTS")
    return {"cfg": cfg, "pid": os.getpid(), "argv": sys.argv[0], **{name: os.environ.get(name) for name in names}}


def mistake(cfg: dict[str, Any]) -> None:
    """The last rank raises a user error."""
    if _rank() == int(os.environ["WORLD_SIZE"]) - 1:
        with open(Path(cfg["folder"], "tries"), "a") as file:
            file.write("x")
        raise UserError("data.batch_size=7: a sentence with 'quotes'.")
    time.sleep(30)


def bug(cfg: dict[str, Any]) -> None:
    key_schemas(cfg["bug"], "train")


def lost(cfg: dict[str, Any]) -> None:
    with open(Path(cfg["folder"], "tries"), "a") as file:
        file.write("x")
    raise ConnectionError("no network")


def stopped(cfg: dict[str, Any]) -> None:
    raise Stopped("SIGUSR1", "python train.py resume=logs/x")


def killed(cfg: dict[str, Any]) -> str:
    """Die at the first `cfg["deaths"]` starts, and record each start."""
    if _rank() == 0:
        note = Path(cfg["folder"], "starts")
        count = len(note.read_text()) if note.exists() else 0
        note.write_text("x" * (count + 1))
        if count < cfg["deaths"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return f"start {count + 1}"
    time.sleep(0.5)
    return "other"


def echo(cfg: dict[str, Any]) -> dict[str, Any]:
    """A run that begins, and ends with its seed as its objective."""
    run_dir = Path(cfg["paths"]["run_dir"])
    (run_dir / "metrics.csv").write_text("step\n")
    (run_dir / "result.json").write_text(json.dumps({"steps": 0, "seconds": 1.0, "objective": cfg["seed"]}))
    return {"objective": cfg["seed"], "cfg": cfg}


def breaks_off(cfg: dict[str, Any]) -> None:
    """A run that begins and does not end."""
    (Path(cfg["paths"]["run_dir"]) / "metrics.csv").write_text("step\n")
    raise UserError("it broke off.")


def never_begins(cfg: dict[str, Any]) -> None:
    raise UserError("it never began.")


def reads(cfg: dict[str, Any]) -> dict[str, Any]:
    return cfg


def hangs(cfg: dict[str, Any]) -> str:
    """Sum ones over ranks; a rank sleeps in the third sum of the first `cfg["hangs"]` starts."""
    import torch

    note = Path(cfg["folder"], "starts")
    trainer = SimpleNamespace(global_step=0)
    if _rank() == cfg["rank"]:
        start = len(note.read_text()) if note.exists() else 0
        note.write_text("x" * (start + 1))
    for step in range(4):
        trainer.global_step = step
        if step == 2 and _rank() == cfg["rank"] and start < cfg["hangs"]:
            time.sleep(600)
        torch.distributed.all_reduce(torch.ones(1))
    return f"{trainer.global_step + 1} steps"
