"""Suites that compare sides in this process, without the launcher: checks and runs a request. Imports no torch."""

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from lathe.errors import refuse, require

# The values of the request's nulls. A key that a suite lacks here is an error if given.
DEFAULTS: dict[str, dict[str, Any]] = {
    "loaders": {
        "rounds": 7,
        "seconds": 0.3,
        "workers": None,  # 0 and the number of cores, at most 8
        "batch_size": None,  # a size for each kind of data
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
# scripts/export.py's overrides for int8. Any loss is a result here, measured on all held-out data.
FILES = ("run=trained", "target=[onnx,onnx_int8]", "target.samples=null", "target.max_drop=null")
FORMER = {"data": "loaders"}


def now(suite: str) -> str:
    """Return a suite's current name."""
    if suite in FORMER:
        print(f"suite={suite} is called suite={FORMER[suite]} now.", flush=True)
    return FORMER.get(suite, suite)


def plan(request: dict[str, Any]) -> dict[str, Any]:
    """Return the request with its nulls filled in."""
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
    """Measure a planned request, write the result files into `output`, and return the tables.

    Raises:
        UserError: this machine can't run the suite, or with `assert`, a claim of the suite fails.
    """
    import torch  # imported late, so that mistakes in the request are reported first

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
