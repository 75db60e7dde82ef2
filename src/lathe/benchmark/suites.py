"""Suites: what a request for one asks for. Imports no torch."""

from collections.abc import Sequence
from typing import Any

from lathe.benchmark.cases import Case, gpu, memory, overhead, scaling
from lathe.errors import require

# What no benchmark wants of a run: files, validation, a screen.
QUIET = (
    "trainer.limit_val_batches=0",
    "trainer.enable_checkpointing=false",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "trainer.log_every_n_steps=50",
    "trainer.max_epochs=-1",
    "scheduler=constant",
)
SUITES = {"scaling": scaling, "memory": memory, "gpu": gpu, "overhead": overhead}
INFERENCE = "inference"  # measures a finished run (lathe.benchmark.inference), no cases of training
TRAINING_KEYS = ("strategies", "steps", "batch_size", "accelerator")
INFERENCE_KEYS = ("run", "targets", "batches", "seconds")
# What the request's nulls mean.
DEFAULTS: dict[str, dict[str, Any]] = {
    "scaling": {
        "strategies": ["ddp", "fsdp"],
        "processes": [1, 2],
        "rounds": 15,
        "steps": 30,
        "warmup": 5,
        "batch_size": 768,
        "accelerator": "cpu",
        "threads": 1,
    },
    "memory": {
        "strategies": ["ddp", "fsdp", "deepspeed_1", "deepspeed_2", "deepspeed_3", "tensor", "pipeline"],
        "processes": [1, 2],
        "rounds": 1,
        "steps": 3,
        "warmup": 0,
        "batch_size": 256,
        "accelerator": "cpu",
        "threads": 1,
    },
    "gpu": {
        "strategies": ["fsdp", "tensor", "deepspeed_2"],
        "rounds": 3,
        "steps": 20,
        "warmup": 10,
        "batch_size": 0,
        "accelerator": "gpu",
        "threads": 1,
    },
    "overhead": {
        "strategies": [],
        "rounds": 5,
        "steps": 10,
        "warmup": 3,
        "batch_size": 128,
        "accelerator": "cpu",
        "threads": 1,
    },
    INFERENCE: {"rounds": 100, "warmup": 10, "seconds": 20.0, "batches": [1, 8, 32]},
}


def plan(request: dict[str, Any]) -> tuple[list[Case], dict[str, Any]]:
    """The cases of the suite that `request` asks for, and the request with its nulls filled in; suite=inference has no
    cases.

    Raises:
        UserError: a key of another suite, or a suite that this machine can't run.
    """
    suite = request["suite"]
    full = {**request, **{key: value for key, value in DEFAULTS[suite].items() if request.get(key) is None}}
    for key in TRAINING_KEYS if suite == INFERENCE else INFERENCE_KEYS:
        require(request.get(key) is None, f"{key}={request.get(key)} has no meaning for suite={suite}: leave it null.")
    taken = "processes" in DEFAULTS[suite] or request.get("processes") is None
    require(taken, f"processes={request.get('processes')} has no meaning for suite={suite}: leave it null.")
    if suite != INFERENCE:
        threads = full["threads"]
        require(isinstance(threads, int), f"threads={threads}: a suite of training runs takes one number of threads.")
        return SUITES[suite](full), full
    require(full.get("run") is not None, "suite=inference measures a finished run: name it with run=<run directory>.")
    if full["threads"] is None:
        from lathe.measure import usable_cores  # here: it imports torch

        full["threads"] = [1, usable_cores()]
    for key in ("targets", "batches", "threads"):
        full[key] = full[key] if isinstance(full[key], list) or full[key] is None else [full[key]]
    for key in ("batches", "threads"):
        full[key] = sorted(set(full[key]))
    return [], full


def overrides_of(case: Case, request: dict[str, Any]) -> list[str]:
    """All overrides of a case; those that the request adds win."""
    steps = request["warmup"] + request["steps"] + (0 if case.kind == "memory" else 1)
    end = [f"trainer.max_steps={steps}", f"trainer.accelerator={request['accelerator']}"]
    return [*QUIET, *case.overrides, *end, *request["overrides"]]


def order(cases: Sequence[Case], round_number: int) -> list[Case]:
    """The cases of a round: each round begins with another one, so that none always follows the same."""
    start = round_number % len(cases)
    return [*cases[start:], *cases[:start]]
