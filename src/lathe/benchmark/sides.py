"""Suites that measure sides beside each other in this process, without runs by the launcher: what a request for one
asks for. Imports no torch.
"""

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from lathe.errors import refuse, require

# What the request's nulls mean; keys that a suite does not have here mean nothing to it.
DEFAULTS: dict[str, dict[str, Any]] = {
    "loaders": {
        "rounds": 7,
        "seconds": 0.3,
        "workers": None,  # 0 and as many as there are cores, 8 at most
        "batch_size": None,  # each kind of data has its own
        "accelerator": "cpu",
        "threads": 1,
    },
    "trainer": {"rounds": 7, "steps": 400, "batch_size": 64, "threads": 1},
    "int8": {
        "run": None,
        "qat": None,
        "rounds": 7,
        "steps": 20,
        "warmup": 5,
        "batches": [1, 32],
        "accelerator": "cpu",
        "threads": 1,
    },
}
KEYS = (
    *("run", "targets", "batches", "seconds", "processes", "strategies", "rounds", "warmup", "steps", "batch_size"),
    *("threads", "accelerator", "workers", "qat", "base", "epochs", "thresholds"),
)
# What int8 exports: overrides of scripts/export.py. Any loss is a finding here, and judged on all held-out data.
FILES = ("run=trained", "target=[onnx,onnx_int8]", "target.samples=null", "target.max_drop=null")
FORMER = {"data": "loaders"}


def now(suite: str) -> str:
    """The name that a suite has now."""
    if suite in FORMER:
        print(f"suite={suite} is called suite={FORMER[suite]} now.", flush=True)
    return FORMER.get(suite, suite)


def plan(request: dict[str, Any]) -> dict[str, Any]:
    """The request with its nulls filled in.

    Raises:
        UserError: a key that means nothing to the suite, or a value that it can't use.
    """
    suite = request["suite"]
    defaults = DEFAULTS[suite]
    for key in KEYS:
        value = request.get(key)
        require(key in defaults or value is None, f"{key}={value} has no meaning for suite={suite}: leave it null.")
    require(
        suite == "int8" or not request["overrides"],
        f"overrides={request['overrides']} has no meaning for suite={suite}, which trains no run of the training "
        "configuration: leave it out.",
    )
    full = {**request, **{key: value for key, value in defaults.items() if request.get(key) is None}}
    require(isinstance(full["threads"], int), f"threads={full['threads']}: suite={suite} takes one number of threads.")
    if suite == "int8":
        given = next((key for key in ("qat", "accelerator") if request.get(key) is not None), None)
        require(
            full["run"] is None or given is None,
            f"{given}={request.get(str(given))} is for a run that suite=int8 trains itself: leave it null with run=.",
        )
        require(
            full["run"] is None or not full["overrides"],
            f"overrides={full['overrides']} are for a run that suite=int8 trains itself: leave them out with run=.",
        )
        full["batches"] = sorted(set(full["batches"]))
    return full


def run(request: dict[str, Any], output: Path, tell: Callable[[str], None] = print) -> str:
    """Measures the suite of a planned request, writes results.json, results.md and plot.svg into `output`, and returns
    the tables.

    Raises:
        UserError: this machine can't run the suite; with `assert`, a bar of the suite's is missed.
    """
    import torch  # here: a mistake in the request is told first

    from lathe.benchmark.thresholds import Threshold, missed
    from lathe.benchmark.turns import write

    require(
        request.get("accelerator") != "gpu" or torch.cuda.is_available(),
        f"accelerator=gpu: suite={request['suite']} would use an NVIDIA GPU and none is visible here: leave it null.",
    )
    suite, threads, began = (
        import_module(f"lathe.benchmark.{request['suite']}"),
        torch.get_num_threads(),
        time.monotonic(),
    )
    torch.set_num_threads(request["threads"])
    try:
        with torch.random.fork_rng(devices=[]):
            facts, results = suite.measure(request, output, tell)
    finally:
        torch.set_num_threads(threads)
    text = write(output, facts, results, suite, request, time.monotonic() - began, tell)
    if request.get("assert"):
        refuse(missed(Threshold(sentence, measured, **limit) for sentence, measured, limit in suite.claims(results)))
    return text
