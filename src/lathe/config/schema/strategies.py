"""Strategies, precision, compilation and the launch: where and how a net is run."""

from lathe.config.schema.rule import Rule, anything, count, flag, group, items, number, text, whole, word

KINDS = ("distillation", "structure", "masks", "quantization", "after")  # of methods of compression, in their order
PRECISIONS = ("64-true", "32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true")
_group: dict[str, Rule] = {
    "processes": word("per_device", "one"),
    "precisions": items(word(*PRECISIONS), 1),
    "compressions": items(word(*KINDS)),
}
_ranks = whole(1, 1_000_000)
_pipeline: dict[str, Rule] = {
    "microbatches": _ranks | None,
    "schedule": word("gpipe", "1f1b", "interleaved"),
    "slices": _ranks,
}
_files: dict[str, Rule] = {"checkpoint": word("full", "sharded"), "reshard_after_forward": flag | None}
_numbers = whole(1, 2**40)

STRATEGIES: dict[str, dict[str, Rule]] = {
    "lathe.strategies.auto": _group,
    "lathe.strategies.DDP": {
        **_group,
        "find_unused_parameters": flag,
        "gradient_as_bucket_view": flag,
        "static_graph": flag,
        "broadcast_buffers": flag,
        "bucket_cap_mb": whole(1, 2**20),
        "comm_hook": word("fp16", "bf16", "powersgd") | None,
        "powersgd_rank": count,
        "powersgd_start_step": whole(2).of("optimizer steps"),
    },
    "lathe.legacy.DP": {**_group, "devices": whole(1, 1_000_000, also=[-1]) | "auto" | items(whole(0), 1) | None},
    "lathe.strategies.DeepSpeed": {
        **_group,
        "stage": whole(1, 3),
        "offload_optimizer": flag,
        "offload_parameters": flag,
        "pin_memory": flag,
        "reduce_bucket_size": _numbers,
        "allgather_bucket_size": _numbers,
        "overlap_comm": flag,
        "contiguous_gradients": flag,
        "sub_group_size": _numbers,
        "persistence_threshold": whole(0, 2**40),
        "model_persistence_threshold": whole(0, 2**40) | None,
        "prefetch_bucket_size": whole(0, 2**40),
        "max_live_parameters": whole(0, 2**40),
        "log_level": word("debug", "info", "warning", "error"),
    },
    "lathe.strategies.FSDP": {**_group, **_files, "min_params": whole(1), "cpu_offload": flag, "replicas": _ranks},
    "lathe.legacy.Horovod": _group,
    "lathe.strategies.ModelSplit": {
        **_group,
        "devices": items(text("a device"), 1) | None,
        "split": items(count, 1) | None,
    },
    "lathe.strategies.Pipeline": {**_group, **_pipeline, "stages": _ranks | None, "data": _ranks | None},
    "lathe.strategies.TensorParallel": {
        **_group,
        **_files,
        "tensor": _ranks | None,
        "data": _ranks | None,
        "sequence_parallel": flag,
        "fsdp": flag,
    },
    "lathe.strategies.ThreeD": {
        **_group,
        **_pipeline,
        "data": _ranks | None,
        "tensor": _ranks | None,
        "stages": _ranks | None,
        "sequence_parallel": flag,
    },
}

_seconds = number(above=0)
LAUNCH: dict[str, Rule] = {
    "max_restarts": whole(0, 1_000_000),
    "monitor_interval": _seconds,
    "timeout": _seconds,
    "nodes": whole(1, 1_000_000) | text("min:max such as 2:4", r"\d{1,7}:\d{1,7}"),
    "endpoint": text("host:port", r"\S+:\d+") | None,
    "id": text("a name of letters, digits and . _ -", r"[\w.:-]+") | whole(0) | None,
    "join_timeout": _seconds,
    "last_call_timeout": _seconds,
    "numa": word("none", "node", "socket", "exclusive", "auto"),
    "threads": whole(1, 1024) | "auto" | None,
}
PRECISION: dict[str, Rule] = {
    "name": word(*PRECISIONS, "auto"),
    "matmul": word("highest", "high", "medium"),
    "init_scale": number(above=0),
    "growth_interval": count,
}
COMPILE: dict[str, Rule] = {
    "enabled": flag,
    "scope": word("net", "step"),
    "mode": word("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    "regional": flag | word("auto"),
    "dynamic": flag | None,
    "fullgraph": flag,
    "backend": word("inductor", "aot_eager", "eager"),
    "options": group(anything) | None,
}
