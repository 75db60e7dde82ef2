"""Many short runs in one launch, which compare the losses of a strategy with those of one process."""

import contextlib
import io
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from lathe.callbacks import Graphs
from lathe.config.validate import check, check_compression
from lathe.errors import UserError, refuse, require
from lathe.training.train import train


def run_cases(cfg: dict[str, Any]) -> None:
    """Train each of `cfg["cases"]`, resolved configurations with a run directory, in the same ranks.

    Before and after each, rank 0 appends a line to the file `cfg["notes"]`: {"case", "began"}, and {"case", "refused",
    "breaks", "made", "anew"}. `refused` is the message of a UserError or null, `breaks` counts graph breaks by reason,
    `made` the graphs compiled, and `anew` those compiled after the first step. Other errors are raised and end the
    launch, since the ranks may be at different points.
    """
    for case in cfg["cases"]:
        number = case["case"]
        _note(cfg["notes"], {"case": number, "began": True})
        refused = None
        counters.clear()
        Graphs.made = Graphs.anew = 0
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                fresh = {**case, "paths": {**case["paths"], "run_dir": None}}
                refuse(check(fresh, rules=[check_compression]))
                train(case)
        except UserError as error:
            refused = str(error)
        finally:
            torch.compiler.reset()
        breaks = dict(counters["graph_break"])
        counts = {"breaks": breaks, "made": Graphs.made, "anew": Graphs.anew}
        _note(cfg["notes"], {"case": number, "refused": refused, **counts})


def _note(path: str, line: dict[str, Any]) -> None:
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    if "began" in line:
        print(f"case {line['case']}", file=sys.stderr, flush=True)
    with Path(path).open("a") as file:
        file.write(json.dumps(line) + "\n")


def select_models(requested: Any, known: Any) -> dict[str, Any]:
    """Return nets by title: `requested` itself, or the known ones of a list of titles."""
    if isinstance(requested, dict):
        return requested
    unknown = [str(title) for title in requested if title not in known]
    require(not unknown, f"models=[{', '.join(unknown)}]: expected some of {', '.join(known)}.")
    return {title: known[title] for title in requested}


def graphs(works: list[dict[str, Any]]) -> str:
    """Return a summary of the compiled cells: graph breaks and recompilations by strategy."""
    compiled = [case for case in works if case["compile"] != "none"]
    breaks, anew, none = Counter[str](), Counter[str](), Counter[str]()
    for case in compiled:
        breaks[case["strategy"]] += sum(case["breaks"].values())
        anew[case["strategy"]] += case["anew"]
        none[case["strategy"]] += not case["made"]
    places, late, missing = (
        ", ".join(f"{count} in {strategy}" for strategy, count in (+counts).items()) or "none"
        for counts in (breaks, anew, none)
    )
    return (
        f"{len(compiled)} compiled cells; places where a graph was given up: {places}; graphs made in training after\n"
        f"the first optimizer step: {late}; cells without any graph: {missing}."
    )
