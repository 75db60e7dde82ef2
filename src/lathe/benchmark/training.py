"""Cases of the suites that compare trainings: precision, compile, parallel. Imports torch only to look for a GPU."""

from collections.abc import Mapping, Sequence
from typing import Any

from lathe.benchmark.cases import Case
from lathe.errors import require

# The values of a request's nulls by device: `own` are the task's overrides, `lr` is given if a row scales it.
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "precision": {
        "cpu": {
            "own": (
                "model=vit_tiny",
                "model.net.patch_size=2",
                "model.net.width=64",
                "model.net.depth=2",
                "model.net.heads=4",
                "data=digits",
                "optimizer=adamw",
            ),
            "batch_size": 50,
            "rounds": 5,
            "warmup": 3,
            "steps": 12,
            "epochs": 3,
        },
        # As large as BERT-large (24 blocks of width 1024 with 16 heads), on 400 tokens; BERT is fine-tuned on SQuAD
        # with 384.
        "gpu": {
            "own": (
                "model=vit_tiny",
                "model.net.patch_size=16",
                "model.net.width=1024",
                "model.net.depth=24",
                "model.net.heads=16",
                "data=synthetic",
                "data.channels=3",
                "data.image_size=320",
                "data.mean=[0.5,0.5,0.5]",
                "data.std=[0.25,0.25,0.25]",
                "data.source.train_size=1024",
                "data.source.val_size=256",
                "data.source.test_size=16",
                "optimizer=adamw",
                "optimizer.lr=1e-4",
            ),
            "batch_size": 8,
            "rounds": 5,
            "warmup": 10,
            "steps": 30,
            "epochs": 3,
        },
    },
    "compile": {
        "cpu": {
            "own": (
                "model=gpt_nano",
                "model.net.width=64",
                "model.net.depth=12",
                "data=synthetic_tokens",
                "data.length=64",
                "optimizer=adamw",
            ),
            "batch_size": 16,
            "rounds": 1,
            "warmup": 5,
            "steps": 60,
        },
        "gpu": {
            "own": (
                "model=gpt2_small",
                "data=synthetic_tokens",
                "data.vocab_size=50257",
                "data.length=1024",
                "data.source.train_size=256",
                "data.source.val_size=8",
                "data.source.test_size=8",
                "optimizer=adamw",
                "precision=bf16-mixed",
            ),
            "batch_size": 8,
            "rounds": 3,
            "warmup": 10,
            "steps": 50,
        },
    },
    "parallel": {
        "cpu": {
            "own": ("model=resnet20", "data=digits", "optimizer=sgd"),
            "lr": 0.1,
            "amp": "bf16-mixed",
            "batch_size": 50,
            "rounds": 5,
            "warmup": 3,
            "steps": 10,
            "epochs": 8,
        },
        "gpu": {
            "own": ("experiment=cifar10_resnet50_amp",),
            "lr": 0.1,
            "amp": "16-mixed",
            "batch_size": 256,
            "rounds": 3,
            "warmup": 10,
            "steps": 30,
            "epochs": 10,
        },
    },
}
WARMUP = 0.2  # share of the run in which a scaled learning rate is warmed up


def device_here() -> str:
    """Return gpu if torch sees one, else cpu."""
    import torch

    return "gpu" if torch.cuda.is_available() or torch.backends.mps.is_available() else "cpu"


def fill(request: dict[str, Any], base: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the request with its nulls filled in from the device's sizes, or the experiment's `base`."""
    device = request["accelerator"] or device_here()
    sizes = SIZES[request["suite"]][device]
    found = {**request, "accelerator": device, **{k: v for k, v in sizes.items() if request.get(k) is None}}
    if base is not None:
        found["own"] = words_of(request, base)
        found["batch_size"] = request["batch_size"] or batch_of(request, base)
        found["lr"] = (base.get("optimizer") or {}).get("lr")
    return found


def words_of(request: Mapping[str, Any], base: Mapping[str, Any]) -> tuple[str, ...]:
    """Return an experiment's overrides without its schedule: all suites use a constant learning rate."""
    kept = ("_target_", "_partial_", "warmup")
    foreign = (key for key in base.get("scheduler") or {} if key not in kept)
    return (f"experiment={request['base']}", *(f"~scheduler.{key}" for key in foreign))


def batch_of(request: Mapping[str, Any], base: Mapping[str, Any]) -> int:
    """Return an experiment's batch size, for a request without batch_size."""
    size = base["data"].get("batch_size")
    require(
        isinstance(size, int),
        f"experiment={request['base']} has no data.batch_size: give batch_size=<samples of a step>.",
    )
    return int(size)


def base_of(request: Mapping[str, Any], one_device: bool = True) -> tuple[str, ...]:
    own = () if request["suite"] == "parallel" else (f"data.batch_size={request['batch_size']}",)
    return (*request["own"], *own, *(("trainer.devices=1",) if one_device else ()))


FORMATS = ("32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true")  # compared with the first


def precision(request: dict[str, Any]) -> list[Case]:
    """Return a step in each number format, and a short training. An unsupported format has a row with its error."""
    return [
        Case(
            name,
            (*base_of(request), f"precision={name}"),
            1,
            peak=True,
            train=True,
            optional=True,
            facts={"precision": name},
        )
        for name in FORMATS
    ]


COMPILES = {
    "none": ("compile=none",),
    "default": ("compile=default", "compile.regional=false"),
    "reduce-overhead": ("compile=reduce-overhead", "compile.regional=false"),
    "max-autotune": ("compile=max-autotune", "compile.regional=false"),
    "regional": ("compile=default", "compile.regional=true"),
    "step": ("compile=default", "compile.scope=step"),
}


def compiled(request: dict[str, Any]) -> list[Case]:
    """Return the ways to compile, each measured with an empty compile cache and again with the filled one."""
    warmup = request["warmup"]
    require(
        warmup > 1,
        f"warmup={warmup}: suite=compile tells how long the first steps take, of which it needs two: give at least 2.",
    )
    return [
        Case(name, (*base_of(request), *words), 1, "compile", alone=True, optional=True, facts={"compile": name})
        for name, words in COMPILES.items()
    ]


def parallel(request: dict[str, Any]) -> list[Case]:
    """Return one process, DataParallel, and DDP in several variants.

    DDP has the same global batch, the same in mixed precision, and a batch that grows with the processes, at the same
    learning rate and at one that grows too, after a warm-up (Goyal et al. 2017, arXiv:1706.02677).
    """
    n, batch, lr = processes_of(request), request["batch_size"], request["lr"]
    require(
        isinstance(lr, (int, float)),
        f"experiment={request['base']} has no optimizer.lr, which a row of suite=parallel scales: name another.",
    )
    require(batch % n == 0, f"batch_size={batch} does not divide by processes={n}: change either.")
    plain, amp = "precision=32-true", f"precision={request['amp']}"
    rows: Sequence[tuple[str, str, int, int, float, float, str]] = (
        ("single", "auto", 1, batch, lr, 0, plain),
        ("dp", "dp", n, batch, lr, 0, plain),
        ("ddp", "ddp", n, batch, lr, 0, plain),
        ("ddp_amp", "ddp", n, batch, lr, 0, amp),
        ("ddp_large", "ddp", n, batch * n, lr, 0, plain),
        ("ddp_scaled", "ddp", n, batch * n, lr * n, WARMUP, plain),
    )
    return [
        Case(
            name,
            (
                *base_of(request, one_device=False),
                f"strategy={strategy}",
                f"trainer.devices={devices}",
                f"data.batch_size={total}",
                f"optimizer.lr={rate}",
                f"scheduler.warmup={warmup}",
                number_format,
            ),
            devices,
            peak=True,
            train=True,
            optional=True,
            facts={"strategy": strategy, "batch_size": total, "lr": rate, "warmup": warmup},
        )
        for name, strategy, devices, total, rate, warmup, number_format in rows
    ]


def processes_of(request: Mapping[str, Any]) -> int:
    """Return the number of processes of suite=parallel: the given one, or all GPUs, or 2."""
    counts = request["processes"]
    if counts is None:
        import torch

        return max(2, torch.cuda.device_count() if request["accelerator"] == "gpu" else 2)
    require(
        len(counts) == 1 and counts[0] > 1,
        f"processes={counts}: suite=parallel sets one number of processes, from 2, against a single one: give [2].",
    )
    return int(counts[0])


EFFICIENCY = {2: 0.85, 4: 0.80, 8: 0.75}  # by number of processes, unless the request sets one


def possible_limits(request: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the possible names of `thresholds` in this request, each with the suite's limit or None.

    scaling: numbers of processes, efficiency at least. parallel: rows, speed-up over the single process at least.
    precision: formats, speed-up over 32-true at least, and with the suffix `_memory` the peak at most. compile: `warm`
    start over the cold one at most, `regional` cold start over the whole net's at most, `anew` graph breaks and graphs
    compiled after the warm-up at most, and rows, speed-up over none at least.
    """
    suite = request["suite"]
    if suite == "scaling":
        return {str(n): EFFICIENCY.get(n) for n in sorted(set(request["processes"])) if n > 1}
    if suite == "parallel":
        n = processes_of(request)
        share = EFFICIENCY.get(n)
        none: dict[str, float | None] = dict.fromkeys(("dp", "ddp", "ddp_amp", "ddp_large", "ddp_scaled"))
        return {**none, "ddp_scaled": None if share is None else share * n}
    if suite == "precision":
        found: dict[str, float | None] = {f"{name}{what}": None for name in FORMATS[1:] for what in ("", "_memory")}
        if request["accelerator"] == "gpu":  # published for BERT-large
            found |= {"16-mixed": 2.3, "16-mixed_memory": 0.6}
        return found
    if suite == "compile":
        rows: dict[str, float | None] = dict.fromkeys(name for name in COMPILES if name not in ("none", "regional"))
        return {"warm": 0.3, "regional": 0.5, "anew": 0.0, **rows}
    return {}
