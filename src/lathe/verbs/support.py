"""Many short runs in one launch: what a strategy does to losses, beside one process."""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch

from lathe.config.composed import check
from lathe.config.stages import check_compression
from lathe.errors import UserError, refuse
from lathe.verbs.train import train


def run_cases(cfg: dict[str, Any]) -> None:
    """Trains each of `cfg["cases"]`, resolved configurations with a run directory, one after the other in the same
    ranks.

    Rank 0 adds a line to the file `cfg["notes"]` before and after each: {"case", "began"} and {"case", "refused"},
    where `refused` is the sentence or null. What is no sentence is raised: the ranks may then stand in different
    places, so the launch has to end.
    """
    for case in cfg["cases"]:
        number = case["case"]
        _note(cfg["notes"], {"case": number, "began": True})
        refused = None
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                fresh = {**case, "paths": {**case["paths"], "run_dir": None}}
                refuse(check(fresh, rules=[check_compression]))
                train(case)
        except UserError as error:
            refused = str(error)
        finally:
            torch.compiler.reset()
        _note(cfg["notes"], {"case": number, "refused": refused})


def _note(path: str, words: dict[str, Any]) -> None:
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    if "began" in words:
        print(f"case {words['case']}", file=sys.stderr, flush=True)
    with Path(path).open("a") as file:
        file.write(json.dumps(words) + "\n")
