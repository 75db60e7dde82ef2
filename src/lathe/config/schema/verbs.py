"""The keys of train.yaml and of the other verbs' YAML files: what stands where."""

from lathe.config.schema.many import BATCH_FIND, GPU_CHECK, LR_FIND, REPRODUCE, RUNS
from lathe.config.schema.models import INIT, PRETRAINED
from lathe.config.schema.places import Keys, Part, Parts, Place
from lathe.config.schema.rule import (
    Rule,
    anything,
    count,
    flag,
    group,
    items,
    none,
    number,
    path,
    share,
    text,
    whole,
    word,
)
from lathe.config.schema.strategies import COMPILE, LAUNCH, PRECISION, PRECISIONS
from lathe.config.schema.sweeps import SWEEP
from lathe.config.schema.targets import TARGETS
from lathe.config.schema.trainer import ACCELERATORS

_RUN = text("a run directory")
# It becomes a folder below paths.log_dir, where Lathe makes these folders itself.
_NAME = "letters, digits and . _ - + alone, none of . - + first, at most 100, none of latest, benchmark, slurm, sweeps"
_name = text(_NAME, r"(?!(latest|benchmark|slurm|sweeps)$)\w[\w.+-]{0,99}")
_trusted = items(text("a package or a dotted name"))
_kept = text("the name of one that save_top_k kept, or own/<name>", r"epoch=\d+-step=\d+|own/[^/]+")
_checkpoint = word("best", "last") | _kept
_batch = whole(1, 2**31) | None
_launch = Keys(LAUNCH)
_log_dir = Keys({"log_dir": path})
_precision = Keys(PRECISION, ("init_scale", "growth_interval"), null=True)
_seed = whole(0, 2**32 - 1)
_trainings = ("scaling", "memory", "overhead", "gpu", "parallel", "precision", "compile")


def _devices(*more: str) -> Keys:
    keys: dict[str, Place] = {
        "accelerator": word(*ACCELERATORS),
        "devices": whole(1, 1_000_000, also=[-1]) | "auto" | items(whole(0), 1),
    }
    return Keys(keys | dict.fromkeys(more, flag))


TRAIN: dict[str, Place] = {
    "name": _name,
    "tags": items(text("a label")),
    "seed": _seed,
    "test": flag,
    "objective": text("a metric such as val/accuracy") | None,
    "resume": text("a run directory") | "auto" | None,
    "ckpt_path": path | None,
    "ckpt_mode": word("weights", "trainer"),
    "ckpt_sha256": text("a SHA-256 in hexadecimal", r"[0-9a-fA-F]{64}") | None,
    "ckpt_map": group(text("a prefix") | "" | None) | None,
    "ckpt_strict": flag,
    "freeze": items(text("a pattern of parameter names"), 1) | None,
    "trusted": _trusted,
    "paths": Keys({"data_dir": path, "log_dir": path, "run_dir": none}),
    "data": Part(),
    "task": Part(),
    "model": Keys({"init": INIT, "net": Part(), **PRETRAINED}, ("init", "net", *PRETRAINED)),
    "optimizer": Part(empty=True),
    "scheduler": Part(null=True, empty=True),
    "trainer": Part(
        needs=(
            "accelerator",
            "devices",
            "num_nodes",
            "fast_dev_run",
            "enable_checkpointing",
            "enable_progress_bar",
            "enable_model_summary",
        )
    ),
    "strategy": Part(),
    "precision": Keys(PRECISION, ("matmul", "init_scale", "growth_interval")),
    "compile": Keys(COMPILE, tuple(key for key in COMPILE if key != "enabled")),
    "compression": Parts("method", {"stages": items(anything, 1) | None, "receipt": word("quick", "full", "none")}),
    "callbacks": Parts("callback"),
    "logger": Parts("logger"),
    "launch": _launch,
    "sweep": SWEEP,
}

_targets: dict[str, Place] = {name: Keys(options, tuple(options), null=True) for name, options in TARGETS.items()}
_target = Keys(
    {
        "preprocess": flag,
        "input_size": items(whole(1, 65536), 2, 2) | "any" | None,
        "split": word("test", "val"),
        "samples": count | None,
        "tolerance": number(above=0) | None,
        "agreement": share | None,
        "max_drop": number(0) | None,
        **_targets,
    },
    tuple(_targets),
)
_on_a_run: dict[str, Place] = {
    "run": _RUN,
    "batch_size": _batch,
    "strategy": Part(),
    "launch": _launch,
    "paths": _log_dir,
    "trusted": _trusted,
}
_with_data: dict[str, Place] = {**_on_a_run, "data": Keys({"folder": path | None})}
_port, _seconds = whole(0, 65535), number(above=0)

VERBS: dict[str, dict[str, Place]] = {
    "train": TRAIN,
    "evaluate": {
        **_with_data,
        "precision": _precision,
        "split": word("train", "val", "test"),
        "checkpoint": _checkpoint,
        "output": path | None,
        "trainer": _devices("enable_progress_bar"),
    },
    "predict": {
        **_on_a_run,
        "precision": _precision,
        "target": Keys(_targets, tuple(_targets), null=True),
        "input": path,
        "output": path,
        "export": text("one target") | None,
        "checkpoint": _checkpoint,
        "resize": flag,
        "skip_bad": whole(0, 2**31),
        "trainer": _devices("enable_progress_bar"),
    },
    "compress": {
        **_with_data,
        "name": _name | None,
        "checkpoint": _checkpoint,
        "compression": TRAIN["compression"],
        "trainer": _devices(),
    },
    "receipt": {**_with_data, "baseline": _RUN | None, "effort": word("quick", "full"), "trainer": _devices()},
    "sensitivity": {
        **_with_data,
        "checkpoint": _checkpoint,
        "limit_batches": count | None,
        "layers": items(text("a pattern"), 1) | None,
        "sparsities": items(number(0, below=1)),
        "bits": items(whole(2, 8)),
        "reestimate": whole(0),
        "metric": text("a metric"),
        "allocate": word("bits", "sparsity"),
        "budget": number(above=0) | None,
        "latency": path | None,
        "trainer": _devices("enable_progress_bar"),
    },
    "profile": {
        **_with_data,
        "precision": _precision,
        "checkpoint": _checkpoint,
        "warmup": whole(1),
        "steps": whole(2, 1000),
        "top_k": count,
        "trainer": _devices(),
    },
    "export": {**_with_data, "checkpoint": _checkpoint, "target": _target, "trainer": _devices()},
    "serve": {
        **_on_a_run,
        "target": Keys(_targets, tuple(_targets), null=True),
        "export": text("one target") | None,
        "checkpoint": _checkpoint,
        "batch_size": none,  # what comes together is computed together
        "host": text("a name or an address"),
        "hosts": items(text("a name or an address")),
        "port": _port,
        "api_key": text("a key") | whole() | None,
        "workers": whole(1, 1024) | "auto",
        "threads": whole(1, 1024) | None,
        "batch_timeout": number(0),
        **dict.fromkeys(
            (
                "max_batch_size",
                "top_k",
                "max_queue",
                "max_connections",
                "max_body_bytes",
                "max_pixels",
                "max_samples",
                "max_tokens",
            ),
            count,
        ),
        **dict.fromkeys(
            (
                "request_timeout",
                "header_timeout",
                "body_timeout",
                "keep_alive_timeout",
                "health_timeout",
                "stop_timeout",
                "load_timeout",
            ),
            number(above=0, high=1e6),
        ),
        "trainer": Keys({"accelerator": word("cpu", "gpu"), "devices": whole(1, 1)}),  # one process listens
    },
    "lr_find": TRAIN | LR_FIND,
    "batch_find": TRAIN | BATCH_FIND,
    "runs": RUNS,
    "reproduce": REPRODUCE,
    "gpu_check": GPU_CHECK,
    "benchmark": {
        "trusted": _trusted,
        "suite": word(*_trainings, "inference", "loaders", "trainer", "int8", "cli", "data"),
        "base": text("an experiment") | None,
        "run": _RUN | None,
        "targets": items(text("a target"), 1).once() | None,
        "batches": items(count, 1).once() | None,
        "seconds": _seconds | None,
        "processes": items(whole(1, 1024), 1).once() | None,
        "strategies": items(text("a strategy")).once() | None,
        "workers": items(whole(0, 1024), 1).once() | None,
        **dict.fromkeys(("rounds", "batch_size", "epochs", "qat"), count | None),
        "steps": whole(3) | None,
        "warmup": whole(0) | None,
        "threads": whole(1, 1024) | items(whole(1, 1024), 1) | None,
        "accelerator": word("cpu", "gpu") | None,
        "timeout": _seconds,
        "assert": flag,
        "thresholds": group(number(0)) | None,
        "overrides": items(text("an override")),
        "output": path | None,
        "paths": _log_dir,
    },
    "make_shards": {
        "data": Part(),
        "output": path,
        "overwrite": flag,
        "shard_size": whole(1, 2**31),
        "encoding": word("png", "npy"),
        "images": Keys(
            {
                "folder": path | None,
                "channels": whole(1, 3),
                "image_size": whole(1, 65536) | None,
                "val_size": whole(0, 2**31),
                "test_size": whole(0, 2**31),
                "split_seed": _seed,
            }
        ),
        "tars": Keys({"folder": path | None, "num_classes": whole(1, 2**24) | None}),
        "seed": _seed,
        "paths": Keys({"data_dir": path, "log_dir": path}),
    },
    "prepare_tokens": {
        "input": path,
        "output": path,
        "overwrite": flag,
        "suffixes": items(text("an ending"), 1).once(),
        "separator": Rule("string", saying="the text between two documents") | None,
        "tokenizer": text("bytes or a tokenizer"),
        "val_share": number(above=0, below=1),
        "test_share": number(above=0, below=1),
        "split_seed": _seed,
        "paths": Keys({"data_dir": path, "log_dir": path}),
    },
    "report": {
        "runs": text("a folder of runs") | items(text("a folder of runs"), 1).once(),
        "metric": text("a metric") | items(text("a metric"), 1).once() | None,
        "by": text("a key") | items(text("a key"), 1).once() | None,
        "baseline": text("a group's label, or an override") | number() | flag | None,
        "direction": word("max", "min") | None,
        "columns": items(text("a column"), 1).once() | None,
        "interval": word("t", "bootstrap"),
        "confidence": number(above=0, below=1),
        "seed": _seed,
        "formats": items(word("markdown", "csv", "latex", "html")).once(),
        "output": path | None,
        "paths": _log_dir,
    },
    "support": {
        "processes": whole(1, 1024),
        "steps": count,
        "strategies": items(text("a strategy"), 1),
        "precisions": items(word(*PRECISIONS), 1),
        "compiles": items(text("a choice of compile"), 1),
        "inductor": items(word(*PRECISIONS)),
        "models": items(text("a model"), 1) | group(items(text("an override"))),
        "part": word("plain", "compression", "all"),
        "compressions": items(text("a method")) | group(items(text("an override"))),
        "overrides": items(text("an override")),
        "output": path | None,
        "launch": _launch,
        "paths": _log_dir,
    },
}
# Verbs that take what train.py takes.
TRAINING = tuple(verb for verb, tree in VERBS.items() if TRAIN.keys() <= tree.keys())
