"""The suites and their requests. Imports no torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lathe.benchmark import thresholds, training
from lathe.benchmark.cases import Case, gpu, memory, overhead, scaling
from lathe.errors import require

# Benchmarks need no files, validation or progress bar.
QUIET = (
    "trainer.limit_val_batches=0",
    "trainer.enable_checkpointing=false",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "trainer.log_every_n_steps=50",
    "trainer.max_epochs=-1",
    "scheduler=constant",
)
SUITES: dict[str, Callable[[dict[str, Any]], list[Case]]] = {
    "scaling": scaling,
    "memory": memory,
    "gpu": gpu,
    "overhead": overhead,
    "precision": training.precision,
    "compile": training.compiled,
    "parallel": training.parallel,
}
INFERENCE = "inference"  # measures a finished run (lathe.benchmark.inference), and has no cases
# Keys of some suites only: of those with the key in DEFAULTS.
CHOICES = (
    "run",
    "targets",
    "batches",
    "seconds",
    "base",
    "processes",
    "strategies",
    "steps",
    "epochs",
    "batch_size",
    "accelerator",
    "thresholds",
    "workers",
    "qat",
)
# Suites that compare trainings: their sizes depend on the device (training.SIZES).
_BY_DEVICE = dict.fromkeys(("base", "rounds", "steps", "warmup", "batch_size", "accelerator", "thresholds"))
# The values of the request's nulls; None: by the device, or nothing.
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
        "base": None,
        "thresholds": None,
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
        "accelerator": "gpu",
        "threads": 1,
    },
    "overhead": {
        "rounds": 5,
        "steps": 10,
        "warmup": 3,
        "batch_size": 128,
        "accelerator": "cpu",
        "threads": 1,
    },
    "precision": {**_BY_DEVICE, "epochs": None, "threads": 1},
    "compile": {**_BY_DEVICE, "threads": 1},
    "parallel": {**_BY_DEVICE, "epochs": None, "processes": None, "threads": 1},
    INFERENCE: {"rounds": 100, "warmup": 10, "seconds": 20.0, "batches": [1, 8, 32], "run": None, "targets": None},
}


def plan(request: dict[str, Any], composed: Mapping[str, Any] | None = None) -> tuple[list[Case], dict[str, Any]]:
    """Return the cases of a request's suite, and the request with its nulls filled in; suite=inference has no cases.

    `composed` is the resolved configuration of `base_of(request)`, if it names an experiment.

    Raises:
        UserError: a key of another suite, a threshold of an unmeasured figure, or a suite that this machine can't run.
    """
    suite = request["suite"]
    refuse_others(request, DEFAULTS[suite])
    full = {**request, **{key: value for key, value in DEFAULTS[suite].items() if request.get(key) is None}}
    if suite == INFERENCE:
        return [], _of_a_run(full)
    threads = full["threads"]
    require(isinstance(threads, int), f"threads={threads}: a suite of training runs takes one number of threads.")
    if suite in training.SIZES:
        full = training.fill(full, composed)
    elif composed is not None:
        full["own"] = training.words_of(request, composed)
        full["batch_size"] = request["batch_size"] or training.batch_of(request, composed)
    cases = SUITES[suite](full)
    full["thresholds"] = thresholds.limits(full, training.possible_limits(full))
    _refuse_overrides(full, cases)
    return cases, full


def typed(words: Sequence[str]) -> list[str]:
    """Replace `experiment=` by `base=`: Hydra would load the experiment's file, which fits only train.yaml."""
    return [f"base={word[11:]}" if word.startswith("experiment=") else word for word in words]


def base_of(request: Mapping[str, Any]) -> list[str]:
    """Return the overrides of a request's experiment, whose resolved configuration `plan` needs."""
    return [f"experiment={request['base']}", "scheduler=constant", *request["overrides"]]


def refuse_others(request: Mapping[str, Any], taken: Mapping[str, Any]) -> None:
    """Raise UserError if a key of another suite is given."""
    for key in CHOICES:
        value = request.get(key)
        require(
            value is None or key in taken, f"{key}={value} has no meaning for suite={request['suite']}: leave it null."
        )
    require(
        not request.get("assert") or "thresholds" in taken,
        f"assert=true has no meaning for suite={request['suite']}, which has no thresholds: leave it out.",
    )


def _refuse_overrides(request: Mapping[str, Any], cases: Sequence[Case]) -> None:
    """Raise UserError if an override sets a key that distinguishes the suite's rows."""
    if request["suite"] not in training.SIZES:
        return
    own = set(request["own"])
    keys = {word.split("=")[0] for case in cases for word in case.overrides if word not in own}
    for text in request["overrides"]:
        key = str(text).split("=")[0].lstrip("+~")
        require(
            key not in keys,
            f"overrides={text}: suite={request['suite']} sets {key} itself, by its rows or its batch_size; leave it "
            "out, or set it in an experiment that experiment= names.",
        )


def _of_a_run(full: dict[str, Any]) -> dict[str, Any]:
    require(full.get("run") is not None, "suite=inference measures a finished run: name it with run=<run directory>.")
    if full["threads"] is None:
        from lathe.measure import usable_cores  # imported late, since it imports torch

        full["threads"] = [1, usable_cores()]
    for key in ("targets", "batches", "threads"):
        full[key] = full[key] if isinstance(full[key], list) or full[key] is None else [full[key]]
    for key in ("batches", "threads"):
        full[key] = sorted(set(full[key]))
    return full


def overrides_of(case: Case, request: dict[str, Any]) -> list[str]:
    """Return all overrides of a case; the request's win."""
    steps = request["warmup"] + request["steps"] + (0 if case.kind == "memory" else 1)
    end = [f"trainer.max_steps={steps}", f"trainer.accelerator={request['accelerator']}"]
    return [*QUIET, *case.overrides, *end, *request["overrides"]]


def order(cases: Sequence[Case], round_number: int) -> list[Case]:
    """Return the cases of a round. Each round begins with another case, so that none always follows the same one."""
    start = round_number % len(cases)
    return [*cases[start:], *cases[:start]]
