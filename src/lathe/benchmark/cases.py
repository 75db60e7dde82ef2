"""Benchmark cases: overrides of the training configuration, each measured as a separate run."""

from dataclasses import dataclass, field
from typing import Any

from lathe.errors import require

# With the sizes of `scaling`: 0.25 M parameters, about 20 ms a step for 768 samples on one core of a server.
NET = ("model=deep_mlp", "data=synthetic", "optimizer=adamw")
SPLIT = "model_split"  # at least two, named in strategy.devices
CUT = (SPLIT, "pipeline", "3d")  # strategies that hold a part of the net in each process: compared with auto on one


@dataclass(frozen=True)
class Case:
    """One configuration to measure, on `processes` devices, in as many processes as a training run has.

    `alone` cases get fresh processes in each turn, as a peak of memory would include what other cases left. `kind` is
    time, memory, or compile: in two processes, with an empty compile cache and with the first's. `sync` false leaves
    out the gradient reduction, to measure its cost (only ddp; such weights are of no use). With `peak` and `train`,
    the first turn also measures the peak of memory, and trains for the request's `epochs`. An `optional` case that does
    not compose has a row with the error; another one stops the suite. `facts` are columns of the tables.
    """

    name: str
    overrides: tuple[str, ...]
    processes: int
    kind: str = "time"
    sync: bool = True
    alone: bool = False
    peak: bool = False
    train: bool = False
    optional: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


def scaling(request: dict[str, Any]) -> list[Case]:
    """Return each strategy on one and several processes, for weak (the batch grows) and strong scaling."""
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
    net = ("model.net.width=160", "model.net.depth=8", f"data.source.train_size={8 * batch * max(counts)}")
    base = request.get("own") or (*NET, *net)
    cases = []
    for n in counts:
        for strategy in (
            ["auto", *(name for name in request["strategies"] if name not in CUT)] if n == 1 else request["strategies"]
        ):
            for mode in ("weak", "strong") if n > 1 else ("weak",):
                for sync in (True, False) if n > 1 and strategy == "ddp" and mode == "weak" else (True,):
                    total = batch * n if mode == "weak" else batch
                    name = f"{strategy}, {n}, {mode}{'' if sync else ', no sync'}"
                    sizes = (f"data.batch_size={total}", _devices(strategy, n, request))
                    cases.append(
                        Case(
                            name,
                            (*base, f"strategy={strategy}", *sizes),
                            n,
                            sync=sync,
                            peak=sync,
                            facts={"strategy": strategy, "mode": mode, "batch_size": total, "sync": sync},
                        )
                    )
    return cases


def _devices(strategy: str, count: int, request: dict[str, Any]) -> str:
    """Return the override that gives a strategy `count` devices."""
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
    """Return each strategy on the most processes, and activation checkpointing on 64 blocks."""
    n, batch = max(request["processes"]), request["batch_size"]
    require(batch % n == 0, f"batch_size={batch} does not divide by processes={n}: change either.")
    cases = []
    wide = ("model.net.width=512", "model.net.depth=8", "data.batch_size=64", "data.source.train_size=256")
    for strategy in ("auto", *request["strategies"]):
        processes = 1 if strategy == "auto" else n
        # DeepSpeed allocates whole buckets, which by default are many times this net.
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
        "model.net.stem=imagenet",
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
    """Return nets in each precision and strategy on one GPU. An unsupported combination has a row with its error."""
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


# The cost of each method in its full course: moving masks, observed ranges, a teacher as large as the student. By
# default masks move about a hundred times in a run; every tenth step is a short run of 1000 steps.
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
    """Return a training step of ResNet-20 with each compression method, and the plain one."""
    net = ("model=resnet20", "data=digits", "data.image_size=32", f"data.batch_size={request['batch_size']}")
    return [
        Case(name, (*net, *overrides), 1, facts={"method": name})
        for name, overrides in {"plain": ("compression=none",), **METHODS}.items()
    ]
