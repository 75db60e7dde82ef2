"""The suites' requests, and the cases of those that train: overrides of the training configuration, run separately."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lathe.errors import require
from suites.results import limits

SIDES = ("loaders", "trainer", "int8", "cli")  # compare sides in one process, without a launcher
INFERENCE = "inference"  # measures a finished run
JUDGED = ("scaling", "parallel", "precision", "compile", *SIDES)  # suites that take assert=true


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _keys(**keys: Any) -> dict[str, Any]:
    return keys


# Sizes that depend on the device (SIZES) or on the experiment.
_BY_DEVICE = dict.fromkeys(("base", "rounds", "steps", "warmup", "batch_size", "accelerator", "thresholds"))
_ON_CPU = {"accelerator": "cpu", "threads": 1}
_SHARDED = ["ddp", "fsdp", "deepspeed_1", "deepspeed_2", "deepspeed_3", "tensor", "pipeline"]
# By suite, the keys that it takes and the values of their nulls; None: by the device, or nothing.
DEFAULTS: dict[str, dict[str, Any]] = {
    "scaling": {
        **_keys(strategies=["ddp", "fsdp"], processes=[1, 2], base=None, thresholds=None),
        **_keys(rounds=15, steps=30, warmup=5, batch_size=768, **_ON_CPU),
    },
    "memory": _keys(strategies=_SHARDED, processes=[1, 2], rounds=1, steps=3, warmup=0, batch_size=256, **_ON_CPU),
    "overhead": _keys(rounds=5, steps=10, warmup=3, batch_size=128, **_ON_CPU),
    "gpu": _keys(
        strategies=["fsdp", "tensor", "deepspeed_2"], rounds=3, steps=20, warmup=10, accelerator="gpu", threads=1
    ),
    "precision": _keys(**_BY_DEVICE, epochs=None, threads=1),
    "compile": _keys(**_BY_DEVICE, threads=1),
    "parallel": _keys(**_BY_DEVICE, epochs=None, processes=None, threads=1),
    "inference": _keys(run=None, targets=None, batches=[1, 8, 32], threads=None, rounds=100, warmup=10, seconds=20.0),
    # workers: 0 and the number of cores, at most 8; batch_size: a size for each kind of data
    "loaders": _keys(rounds=7, seconds=0.3, workers=None, batch_size=None, **_ON_CPU),
    "trainer": _keys(rounds=7, steps=400, batch_size=64, threads=1),
    "int8": _keys(run=None, qat=None, rounds=7, steps=20, warmup=5, batches=[1, 32], **_ON_CPU),
    "cli": _keys(rounds=9, threads=1),
}
# Overrides of every training run: no files, validation or progress bar.
QUIET = _words(
    "trainer.limit_val_batches=0 trainer.enable_checkpointing=false trainer.enable_progress_bar=false "
    "trainer.enable_model_summary=false trainer.log_every_n_steps=50 trainer.max_epochs=-1 scheduler=constant"
)


@dataclass(frozen=True)
class Case:
    """One configuration to measure, on `processes` devices, in as many processes as a training run has.

    `kind` is time, memory, or compile: in two processes, with an empty compile cache and with the first's. `fresh`
    cases get fresh processes in each turn, since a peak of memory would include what other cases left. With `sync`
    false gradients are not reduced, to measure what that costs (ddp; the weights are of no use). With `peak` and
    `train` the first turn also measures the peak of memory, and trains for the request's `epochs`. An `optional` case
    that does not compose has a row with the error; another one stops the suite. `facts` are columns of the tables.
    """

    name: str
    overrides: tuple[str, ...]
    processes: int
    kind: str = "time"
    sync: bool = True
    fresh: bool = False
    peak: bool = False
    train: bool = False
    optional: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


# scaling and memory: with width 160 and depth 8 0.25 M parameters, about 20 ms a step for 768 samples on one core.
NET = ("model=deep_mlp", "data=synthetic", "optimizer=adamw")
SPLIT = "model_split"  # takes at least two devices, named in strategy.devices
CUT = (SPLIT, "pipeline", "3d")  # strategies that hold a part of the net in each process: compared with auto on one


def scaling(request: Mapping[str, Any]) -> list[Case]:
    """Return each strategy on one and several processes, for weak (the batch grows) and strong scaling."""
    counts, batch = sorted({1, *request["processes"]}), request["batch_size"]
    sizes = ("model.net.width=160", "model.net.depth=8", f"data.source.train_size={8 * batch * max(counts)}")
    base = request.get("own") or (*NET, *sizes)
    cases = []
    for n in counts:
        _require_divides(batch, n)
        whole = [name for name in request["strategies"] if name not in CUT]
        for strategy in ["auto", *whole] if n == 1 else request["strategies"]:
            for mode in ("weak",) if n == 1 else ("weak", "strong"):
                total = batch * n if mode == "weak" else batch
                overrides = (*base, f"strategy={strategy}", f"data.batch_size={total}", _devices(strategy, n, request))
                name, facts = f"{strategy}, {n}, {mode}", {"strategy": strategy, "mode": mode, "batch_size": total}
                cases.append(Case(name, overrides, n, peak=True, facts={**facts, "sync": True}))
                if (strategy, mode) == ("ddp", "weak") and n > 1:
                    unsummed = {**facts, "sync": False}
                    cases.append(Case(f"{name}, no sync", overrides, n, sync=False, facts=unsummed))
    return cases


def _devices(strategy: str, count: int, request: Mapping[str, Any]) -> str:
    """Return the override that gives a strategy `count` devices."""
    if strategy != SPLIT:
        return f"trainer.devices={count}"
    names = [f"cuda:{index}" if request["accelerator"] != "cpu" else "cpu:0" for index in range(count)]
    return f"strategy.devices=[{','.join(names)}]"


def _require_divides(batch: int, n: int) -> None:
    require(batch % n == 0, f"batch_size={batch} does not divide by processes={n}: change either.")


def memory(request: Mapping[str, Any]) -> list[Case]:
    """Return each strategy on the most processes, and activation checkpointing on 64 blocks."""
    n, batch = max(request["processes"]), request["batch_size"]
    _require_divides(batch, n)
    cases = []
    wide = ("model.net.width=512", "model.net.depth=8", "data.batch_size=64", "data.source.train_size=256")
    # DeepSpeed allocates whole buckets, which by default are many times this net.
    buckets = tuple(f"strategy.{key}_bucket_size=500000" for key in ("reduce", "allgather"))
    for strategy in ("auto", *request["strategies"]):
        processes = 1 if strategy == "auto" else n
        own = (f"strategy={strategy}", _devices(strategy, processes, request))
        overrides = (*NET, *wide, *own, *(buckets if strategy.startswith("deepspeed") else ()))
        facts = {"part": "strategy", "strategy": strategy}
        cases.append(Case(f"{strategy}, {processes}", overrides, processes, "memory", fresh=True, facts=facts))
    deep = ("model.net.width=128", "model.net.depth=64", f"data.batch_size={batch}", "trainer.devices=1")
    for how in ("none", "blocks", "every_2", "sqrt"):
        own = (f"data.source.train_size={2 * batch}", f"trainer.activation_checkpointing={how}")
        facts = {"part": "activation_checkpointing", "activation_checkpointing": how}
        cases.append(Case(f"auto, 1, {how}", (*NET, *deep, *own), 1, "memory", fresh=True, facts=facts))
    return cases


GPU_NETS = {
    "gpt2_small": _words(
        "model=gpt2_small data=synthetic_tokens data.vocab_size=50257 data.length=1024 data.batch_size=8 "
        "data.source.train_size=64 data.source.val_size=8 data.source.test_size=8 optimizer=adamw"
    ),
    "resnet50": _words(
        "model=resnet50 model.net.stem=imagenet data=synthetic data.channels=3 data.image_size=128 "
        "data.mean=[0.5,0.5,0.5] data.std=[0.25,0.25,0.25] data.batch_size=64 data.source.train_size=512 "
        "data.source.val_size=64 data.source.test_size=64 optimizer=sgd"
    ),
}


def gpu(request: Mapping[str, Any]) -> list[Case]:
    """Return nets in each precision and strategy on one GPU. An unsupported combination has a row with its error."""
    import torch

    require(torch.cuda.is_available(), "suite=gpu needs an NVIDIA GPU; none is visible. Use suite=scaling.")
    cases = []
    for net, net_overrides in GPU_NETS.items():
        for strategy in ("auto", *request["strategies"]):
            for precision in ("32-true", "bf16-mixed", "16-mixed", "bf16-true"):
                overrides = (*net_overrides, f"strategy={strategy}", f"precision={precision}")
                facts = {"net": net, "strategy": strategy, "precision": precision}
                cases.append(Case(", ".join(facts.values()), overrides, 1, fresh=True, facts=facts))
    return cases


# The cost of each method in its full course: moving masks, observed ranges, a teacher as large as the student. By
# default masks move about a hundred times in a run; every tenth step is a short run of 1000 steps.
MOVING = ("compression.prune.start=0", "compression.prune.end=1", "compression.prune.every_n_steps=10")
METHODS = {
    "plain": ("compression=none",),
    "prune": (*MOVING, "compression=prune"),
    "prune, new masks at each step": (*MOVING, "compression=prune", "compression.prune.every_n_steps=1"),
    "qat": ("compression=qat",),
    "qat, learned steps": ("compression=qat", "compression.qat.lsq=true"),
    "distill": ("compression=distill", "compression.distill.teacher=ema"),
    "distill, prune, qat": (*MOVING, "compression=[distill,prune,qat]", "compression.distill.teacher=ema"),
}


def overhead(request: Mapping[str, Any]) -> list[Case]:
    """Return a training step of ResNet-20 with each compression method, and the plain one."""
    net = ("model=resnet20", "data=digits", "data.image_size=32", f"data.batch_size={request['batch_size']}")
    return [Case(name, (*net, *own), 1, facts={"method": name}) for name, own in METHODS.items()]


SMALL_VIT = _words(
    "model=vit_tiny model.net.patch_size=2 model.net.width=64 model.net.depth=2 model.net.heads=4 data=digits "
    "optimizer=adamw"
)
# As large as BERT-large (24 blocks of width 1024 with 16 heads), on 400 tokens; BERT is fine-tuned on SQuAD with 384.
LARGE_VIT = _words(
    "model=vit_tiny model.net.patch_size=16 model.net.width=1024 model.net.depth=24 model.net.heads=16 data=synthetic "
    "data.channels=3 data.image_size=320 data.mean=[0.5,0.5,0.5] data.std=[0.25,0.25,0.25] optimizer=adamw "
    "optimizer.lr=1e-4 data.source.train_size=1024 data.source.val_size=256 data.source.test_size=16"
)
SMALL_GPT = _words(
    "model=gpt_nano model.net.width=64 model.net.depth=12 data=synthetic_tokens data.length=64 optimizer=adamw"
)
GPT2 = (*GPU_NETS["gpt2_small"], "data.source.train_size=256", "precision=bf16-mixed")
SMALL_RESNET, RESNET50 = ("model=resnet20", "data=digits", "optimizer=sgd"), ("experiment=cifar10_resnet50_amp",)
# precision, compile, parallel: the values of a request's nulls by device. `own` are overrides of the net and its data.
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "precision": {
        "cpu": {"own": SMALL_VIT, "batch_size": 50, "rounds": 5, "warmup": 3, "steps": 12, "epochs": 3},
        "gpu": {"own": LARGE_VIT, "batch_size": 8, "rounds": 5, "warmup": 10, "steps": 30, "epochs": 3},
    },
    "compile": {
        "cpu": {"own": SMALL_GPT, "batch_size": 16, "rounds": 1, "warmup": 5, "steps": 60},
        "gpu": {"own": GPT2, "batch_size": 8, "rounds": 3, "warmup": 10, "steps": 50},
    },
    "parallel": {
        "cpu": {"own": SMALL_RESNET, "batch_size": 50, "rounds": 5, "warmup": 3, "steps": 10, "epochs": 8},
        "gpu": {"own": RESNET50, "batch_size": 256, "rounds": 3, "warmup": 10, "steps": 30, "epochs": 10},
    },
}
FORMATS = ("32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true")  # compared with the first
COMPILES = {
    "none": ("compile=none",),
    "default": ("compile=default", "compile.regional=false"),
    "reduce-overhead": ("compile=reduce-overhead", "compile.regional=false"),
    "max-autotune": ("compile=max-autotune", "compile.regional=false"),
    "regional": ("compile=default", "compile.regional=true"),
    "step": ("compile=default", "compile.scope=step"),
}


def precision(request: Mapping[str, Any]) -> list[Case]:
    """Return a step in each number format, and a short training. An unsupported format has a row with its error."""
    base = (*request["own"], f"data.batch_size={request['batch_size']}", "trainer.devices=1")
    return [
        Case(name, (*base, f"precision={name}"), 1, peak=True, train=True, optional=True, facts={"precision": name})
        for name in FORMATS
    ]


def compiled(request: Mapping[str, Any]) -> list[Case]:
    """Return the ways to compile, each measured with an empty compile cache and again with the filled one."""
    require(request["warmup"] > 1, f"warmup={request['warmup']}: suite=compile needs at least 2 steps of warm-up.")
    base = (*request["own"], f"data.batch_size={request['batch_size']}", "trainer.devices=1")
    return [
        Case(name, (*base, *own), 1, "compile", fresh=True, optional=True, facts={"compile": name})
        for name, own in COMPILES.items()
    ]


def parallel(request: Mapping[str, Any]) -> list[Case]:
    """Return one process, DataParallel, and DDP in several variants.

    DDP has the same global batch, the same in mixed precision, and a batch that grows with the processes, at the same
    learning rate and at one that grows too, after a warm-up in a fifth of the run (Goyal et al. 2017,
    arXiv:1706.02677).
    """
    counts = request["processes"]
    require(len(counts) == 1 and counts[0] > 1, f"processes={counts}: suite=parallel takes one number from 2: [2].")
    n, batch, lr = counts[0], request["batch_size"], request.get("lr", 0.1)
    _require_divides(batch, n)
    plain, amp = "precision=32-true", f"precision={'16-mixed' if request['accelerator'] == 'gpu' else 'bf16-mixed'}"
    rows = [
        ("single", "auto", 1, batch, lr, 0, plain),
        ("dp", "dp", n, batch, lr, 0, plain),
        ("ddp", "ddp", n, batch, lr, 0, plain),
        ("ddp_amp", "ddp", n, batch, lr, 0, amp),
        ("ddp_large", "ddp", n, batch * n, lr, 0, plain),
        ("ddp_scaled", "ddp", n, batch * n, lr * n, 0.2, plain),
    ]
    cases = []
    for name, strategy, devices, total, rate, warmup, number_format in rows:
        sizes = (f"strategy={strategy}", f"trainer.devices={devices}", f"data.batch_size={total}")
        overrides = (*request["own"], *sizes, f"optimizer.lr={rate}", f"scheduler.warmup={warmup}", number_format)
        facts = {"strategy": strategy, "batch_size": total, "lr": rate, "warmup": warmup}
        cases.append(Case(name, overrides, devices, peak=True, train=True, optional=True, facts=facts))
    return cases


CASES: dict[str, Callable[[Mapping[str, Any]], list[Case]]] = {
    "scaling": scaling,
    "memory": memory,
    "gpu": gpu,
    "overhead": overhead,
    "precision": precision,
    "compile": compiled,
    "parallel": parallel,
}


def fill(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request with the suite's values in the place of its nulls.

    Raises:
        UserError: a key is given that the suite does not read.
    """
    suite, defaults = request["suite"], DEFAULTS[request["suite"]]
    for key in {key for keys in DEFAULTS.values() for key in keys} - {*defaults}:
        require(request.get(key) is None, f"{key}={request.get(key)} has no meaning for suite={suite}: leave it null.")
    require(suite in JUDGED or not request["assert"], f"assert=true has no meaning for suite={suite}: leave it out.")
    unread = suite in ("loaders", "trainer", "cli") and request["overrides"]
    require(not unread, f"overrides={unread} has no meaning for suite={suite}: leave it out.")
    named = suite != INFERENCE or request["run"] is not None
    require(named, "suite=inference measures a finished run. Set run=<run directory>.")
    if suite == "int8" and request["run"] is not None:
        for key in ("qat", "accelerator", "overrides"):
            value = request[key]
            require(not value, f"{key}={value} is for a run that suite=int8 trains itself: leave it out with run=.")
    full = {**request, **{key: value for key, value in defaults.items() if request.get(key) is None}}
    single = suite == INFERENCE or not isinstance(full["threads"], list)
    require(single, f"threads={full['threads']}: suite={suite} takes one number of threads.")
    return full


def plan(request: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> tuple[list[Case], dict[str, Any]]:
    """Return the cases of a suite of training runs, and the request with its nulls filled in.

    `base` is the resolved configuration of `base_of(request)`, if the request names an experiment.

    Raises:
        UserError: a key of another suite, a threshold of an unmeasured figure, or a suite that this machine can't run.
    """
    full = fill(request)
    suite = full["suite"]
    if suite in SIZES:
        import torch

        has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
        full["accelerator"] = full["accelerator"] or ("gpu" if has_gpu else "cpu")
        sizes = SIZES[suite][full["accelerator"]]
        full |= {key: value for key, value in sizes.items() if full.get(key) is None}
    if suite == "parallel" and full["processes"] is None:
        full["processes"] = [max(2, torch.cuda.device_count() if full["accelerator"] == "gpu" else 2)]
    if base is not None:  # with a constant learning rate in the place of its schedule
        schedule = [key for key in base["scheduler"] if key not in ("_target_", "_partial_", "warmup")]
        full["own"] = (f"experiment={full['base']}", *(f"~scheduler.{key}" for key in schedule))
        full["batch_size"] = request["batch_size"] or base["data"]["batch_size"]
        full["lr"] = base["optimizer"]["lr"]
    cases = CASES[suite](full)
    keys = {word.split("=")[0] for case in cases for word in case.overrides if word not in full.get("own", ())}
    for text in full["overrides"] if suite in SIZES else ():
        key = str(text).split("=")[0].lstrip("+~")
        require(key not in keys, f"overrides={text}: suite={suite} sets {key} itself. Leave it out.")
    full["thresholds"] = limits(full, facts_of(cases))
    return cases, full


def facts_of(cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """Return the facts of each case by name, with its number of processes."""
    return {case.name: {"processes": case.processes, **case.facts} for case in cases}


def base_of(request: Mapping[str, Any]) -> list[str]:
    """Return the overrides of a request's experiment, whose resolved configuration `plan` needs."""
    return [f"experiment={request['base']}", "scheduler=constant", *request["overrides"]]


def overrides_of(case: Case, request: Mapping[str, Any]) -> list[str]:
    """Return all overrides of a case; the request's win."""
    steps = request["warmup"] + request["steps"] + (0 if case.kind == "memory" else 1)
    end = [f"trainer.max_steps={steps}", f"trainer.accelerator={request['accelerator']}"]
    return [*QUIET, *case.overrides, *end, *request["overrides"]]


def typed(arguments: Sequence[str]) -> list[str]:
    """Replace `experiment=` by `base=`: Hydra would load the experiment's file, which fits only train.yaml."""
    return [f"base={text[11:]}" if text.startswith("experiment=") else text for text in arguments]
