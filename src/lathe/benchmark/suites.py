"""Suites: sets of overrides of the training configuration, each measured as a run of its own. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lathe.errors import did_you_mean, require

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
# With the sizes of `scaling`: 0.25 M parameters, about 20 ms a step for 768 samples on one core of a server.
NET = ("model=deep_mlp", "data=synthetic", "optimizer=adamw")


@dataclass(frozen=True)
class Case:
    """One configuration to measure, on as many devices as `processes` says: in a process for each, or in one where the
    strategy drives several, as a training run has it.

    `alone` cases get fresh processes for each turn: a peak of memory in processes that stay would include what other
    cases left. `facts` go into the tables: strategy, mode, and what else tells cases apart. `kind` is time or memory.
    `sync` false leaves out the summing of gradients, to tell what it costs (ddp alone; such weights are of no use).
    """

    name: str
    overrides: tuple[str, ...]
    processes: int
    kind: str = "time"
    sync: bool = True
    alone: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


def scaling(request: dict[str, Any]) -> list[Case]:
    """Each strategy in one process and in several; weak (the batch grows with the processes) and strong (it does
    not).
    """
    counts = sorted({1, *request["processes"]})
    batch = request["batch_size"]
    require(
        all(isinstance(n, int) and n >= 1 for n in counts),
        f"processes={request['processes']}: give whole numbers from 1.",
    )
    require(
        all(batch % n == 0 for n in counts),
        f"batch_size={batch} does not divide by each of processes={counts}: change either.",
    )
    width, depth = "model.net.width=160", "model.net.depth=8"
    cases = []
    for n in counts:
        for strategy in (
            ["auto", *(name for name in request["strategies"] if name != SPLIT)] if n == 1 else request["strategies"]
        ):
            for mode in ("weak", "strong") if n > 1 else ("weak",):
                for sync in (True, False) if n > 1 and strategy == "ddp" and mode == "weak" else (True,):
                    total = batch * n if mode == "weak" else batch
                    name = f"{strategy}, {n}, {mode}{'' if sync else ', no sync'}"
                    sizes = (
                        f"data.batch_size={total}",
                        f"data.source.train_size={8 * batch * max(counts)}",
                        _devices(strategy, n, request),
                    )
                    cases.append(
                        Case(
                            name,
                            (*NET, width, depth, f"strategy={strategy}", *sizes),
                            n,
                            sync=sync,
                            facts={"strategy": strategy, "mode": mode, "batch_size": total, "sync": sync},
                        )
                    )
    return cases


SPLIT = "model_split"  # names its devices itself, two at least


def _devices(strategy: str, count: int, request: dict[str, Any]) -> str:
    """The override that brings a strategy to so many devices."""
    require(
        strategy != "dp" or request["accelerator"] != "cpu",
        "strategies=[dp] drives GPUs: leave it out, or set accelerator=gpu.",
    )
    if strategy != SPLIT:
        return f"trainer.devices={count}"
    names = [f"cuda:{index}" if request["accelerator"] != "cpu" else "cpu:0" for index in range(count)]
    return f"strategy.devices=[{','.join(names)}]"


CHECKPOINTING = ("none", "blocks", "every_2", "sqrt")


def memory(request: dict[str, Any]) -> list[Case]:
    """Each strategy on the most processes asked for, beside one process; and activation checkpointing on a net of 64
    blocks.
    """
    n, batch = max(request["processes"]), request["batch_size"]
    require(batch % n == 0, f"batch_size={batch} does not divide by processes={n}: change either.")
    cases = []
    wide = ("model.net.width=512", "model.net.depth=8", "data.batch_size=64", "data.source.train_size=256")
    for strategy in ("auto", *request["strategies"]):
        processes = 1 if strategy == "auto" else n
        # DeepSpeed allocates its buckets whole: they would be many times this net.
        small = (
            [f"strategy.{key}_bucket_size=500000" for key in ("reduce", "allgather")]
            if strategy.startswith("deepspeed")
            else []
        )
        cases.append(
            Case(
                f"{strategy}, {processes}",
                (*NET, *wide, f"strategy={strategy}", _devices(strategy, processes, request), *small),
                processes,
                "memory",
                alone=True,
                facts={"part": "strategy", "strategy": strategy},
            )
        )
    deep = (
        "model.net.width=128",
        "model.net.depth=64",
        f"data.batch_size={batch}",
        f"data.source.train_size={2 * batch}",
    )
    for how in CHECKPOINTING:
        cases.append(
            Case(
                f"auto, 1, {how}",
                (*NET, *deep, "trainer.devices=1", f"trainer.activation_checkpointing={how}"),
                1,
                "memory",
                alone=True,
                facts={"part": "checkpointing", "activation_checkpointing": how},
            )
        )
    return cases


PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")
GPU_NETS = {
    "gpt2_small": (
        "model=gpt2_small",
        "data=synthetic_tokens",
        "data.vocab_size=50257",
        "data.length=1024",
        "data.batch_size=8",
        "data.source.train_size=64",
        "data.source.val_size=8",
        "data.source.test_size=8",
        "optimizer=adamw",
    ),
    "resnet50": (
        "model=resnet50",
        "data=synthetic",
        "data.channels=3",
        "data.image_size=128",
        "data.mean=[0.5,0.5,0.5]",
        "data.std=[0.25,0.25,0.25]",
        "data.batch_size=64",
        "data.source.train_size=512",
        "data.source.val_size=64",
        "data.source.test_size=64",
        "optimizer=sgd",
    ),
}


def gpu(request: dict[str, Any]) -> list[Case]:
    """Nets in each precision under each strategy on one GPU. What a strategy does not take is told in its row."""
    import torch

    require(
        torch.cuda.is_available(),
        "suite=gpu needs an NVIDIA GPU and none is visible here: take suite=scaling or suite=memory.",
    )
    cases = []
    for net, overrides in GPU_NETS.items():
        for strategy in ("auto", *request["strategies"]):
            for precision in PRECISIONS:
                cases.append(
                    Case(
                        f"{net}, {strategy}, {precision}",
                        (*overrides, f"strategy={strategy}", f"precision={precision}"),
                        1,
                        alone=True,
                        facts={"net": net, "strategy": strategy, "precision": precision},
                    )
                )
    return cases


# What each method adds to a step, in its full course: masks that move, ranges that are observed, a teacher as large as
# the student. By default masks move about a hundred times in a run; every tenth step is a short run of 1000 steps.
MOVING = ("compression.prune.start=0", "compression.prune.end=1", "compression.prune.every_n_steps=10")
METHODS = {
    "prune": (*MOVING, "compression=prune"),
    "prune, new masks at each step": (*MOVING, "compression=prune", "compression.prune.every_n_steps=1"),
    "qat": ("compression=qat",),
    "qat, learned steps": ("compression=qat", "compression.qat.lsq=true"),
    "distill": ("compression=distill", "compression.distill.teacher=ema"),
    "distill, prune, qat": (*MOVING, "compression=[distill,prune,qat]", "compression.distill.teacher=ema"),
}


def overhead(request: dict[str, Any]) -> list[Case]:
    """A training step of ResNet-20 under each method of compression, beside the plain one."""
    net = ("model=resnet20", "data=digits", "data.image_size=32", f"data.batch_size={request['batch_size']}")
    return [
        Case(name, (*net, *overrides), 1, facts={"method": name})
        for name, overrides in {"plain": ("compression=none",), **METHODS}.items()
    ]


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
        UserError: an unknown suite, a number out of range, a key of another suite, or a suite that this machine can't
            run.
    """
    suite = request["suite"]
    require(suite in DEFAULTS, f"suite={suite}: {did_you_mean(suite, DEFAULTS)}")
    full = {**request, **{key: value for key, value in DEFAULTS[suite].items() if request.get(key) is None}}
    for key in TRAINING_KEYS if suite == INFERENCE else INFERENCE_KEYS:
        require(request.get(key) is None, f"{key}={request.get(key)} has no meaning for suite={suite}: leave it null.")
    taken = "processes" in DEFAULTS[suite] or request.get("processes") is None
    require(taken, f"processes={request.get('processes')} has no meaning for suite={suite}: leave it null.")
    least_of = (
        {"rounds": 1, "warmup": 0} if suite == INFERENCE else {"rounds": 1, "steps": 3, "warmup": 0, "threads": 1}
    )
    for key, least in least_of.items():
        require(
            isinstance(full[key], int) and full[key] >= least, f"{key}={full[key]}: give a whole number from {least}."
        )
    if suite != INFERENCE:
        return SUITES[suite](full), full
    require(full.get("run") is not None, "suite=inference measures a finished run: name it with run=<run directory>.")
    require(full["seconds"] > 0, f"seconds={full['seconds']}: give a number above 0.")
    if full["threads"] is None:
        from lathe.measure import usable_cores  # here: it imports torch

        full["threads"] = [1, usable_cores()]
    for key in ("targets", "batches", "threads"):
        full[key] = full[key] if isinstance(full[key], list) or full[key] is None else [full[key]]
    for key in ("batches", "threads"):
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in full[key])
        require(whole and bool(full[key]), f"{key}={request[key]}: give whole numbers from 1, such as [1,8].")
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
