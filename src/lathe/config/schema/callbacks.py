"""Callbacks of lathe's own, and those of Lightning that configs/ names."""

from lathe.config.schema.rule import Rule, count, flag, number, path, text, whole, word

_metric = text("a metric such as val/loss")
CALLBACKS: dict[str, dict[str, Rule]] = {
    "lathe.callbacks.Checkpoint": {
        "dirpath": path | None,
        "monitor": _metric | None,
        "mode": word("auto", "min", "max"),
        "every_n_train_steps": count | None,
        "every_n_epochs": count | None,
        "async": flag,
    },
    "lathe.callbacks.EMA": {
        "decay": number(0, below=1),
        "every_n_steps": count,
        "start_step": whole(0),
        "warmup": flag,
        "buffers": word("average", "copy"),
    },
    "lathe.callbacks.ModelSummary": {"max_depth": whole(-1, 1000)},
    "lathe.callbacks.NanGuard": {"every_n_steps": count},
    "lathe.callbacks.Preemption": {"every_n_steps": count},
    "lathe.callbacks.Progress": {"refresh_rate": whole(1, 1000), "leave": flag, "plain": flag | None},
    "lathe.callbacks.Throughput": {"window": count | None, "skip_steps": count, "peak_flops": number(above=0) | None},
    "lathe.callbacks.TorchProfiler": {
        "dirpath": path | None,
        "wait": whole(0),
        "warmup": whole(0),
        "active": count,
        "top_k": count,
        "record_shapes": flag,
        "profile_memory": flag,
        "with_stack": flag,
    },
    "lightning.EarlyStopping": {
        "monitor": _metric,
        "mode": word("auto", "min", "max"),
        "patience": whole(0),
        "min_delta": number(0),
        "stopping_threshold": number() | None,
        "divergence_threshold": number() | None,
        "check_finite": flag,
        "check_on_train_epoch_end": flag | None,
        "strict": flag,
        "verbose": flag,
        "log_rank_zero_only": flag,
    },
    "lightning.LearningRateMonitor": {
        "logging_interval": word("step", "epoch") | None,
        "log_momentum": flag,
        "log_weight_decay": flag,
    },
    "lightning.DeviceStatsMonitor": {"cpu_stats": flag | None},
}
