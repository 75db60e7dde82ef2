"""Callbacks of lathe's own, and those of Lightning that configs/ names."""

from lathe.config.schema.rule import Rule, batches, count, flag, items, null, number, path, steps, text, whole, word

_metric = text("a metric such as val/loss")
_address = text("an http:// or https:// address, or env:NAME", r"env:[A-Za-z_]\w*|https?://[^\s/@]+(?:[/?]\S*)?")
_unseen = null("not looking at it")
CALLBACKS: dict[str, dict[str, Rule]] = {
    "lathe.callbacks.Alerts": {
        "url": _address | null("the log alone"),
        "throughput_drop": number(above=0, below=1) | _unseen,
        "loss_rise": number(above=1) | _unseen,
        "temperature": number(0, 200).of("degrees Celsius") | _unseen,
        "disk_free_gb": number(above=0).of("10^9 bytes") | _unseen,
        "timeout": number(above=0, high=600).of("seconds"),
    },
    "lathe.callbacks.Checkpoint": {
        "dirpath": null("checkpoints/ in the run directory; paths.log_dir moves runs"),
        "monitor": _metric | null("the newest state as the best"),
        "mode": word("auto", "min", "max"),
        "every_n_train_steps": steps | null("the ends of epochs alone"),
        "every_n_epochs": count.of("epochs") | null("the last epoch alone"),
        "async": flag,
        "save_top_k": whole(-1, 10000).of("epochs"),
    },
    "lathe.callbacks.DeviceStats": {"cpu_stats": flag | null("the CPU's only when training on one")},
    "lathe.callbacks.EMA": {
        "decay": number(0, below=1),
        "every_n_steps": steps,
        "start_step": whole(0).of("optimizer steps"),
        "warmup": flag,
        "buffers": word("average", "copy"),
    },
    "lathe.callbacks.HardSamples": {
        "share": number(above=0, below=1),
        "hardest": number(0, 1),
        "passes": whole(1, 1000),
    },
    "lathe.callbacks.ImageSizes": {"scales": items(number(above=0, high=1), 1)},
    "lathe.callbacks.Whitening": {
        "samples": whole(1, 2**31).of("images"),
        "settle_epoch": whole(0).of("epochs") | null("never"),
    },
    "lathe.callbacks.ModelSummary": {"max_depth": whole(-1, 1000)},
    "lathe.callbacks.NanGuard": {"every_n_steps": steps},
    "lathe.callbacks.Preemption": {"every_n_steps": steps},
    "lathe.callbacks.Progress": {
        "refresh_rate": whole(1, 1000).of("draws per second"),
        "leave": flag,
        "plain": flag | null("lines where the output is no terminal"),
    },
    "lathe.callbacks.Samples": {
        "split": word("val", "test"),
        "worst": whole(0, 10000).of("samples"),
        "random": whole(0, 10000).of("samples"),
        "bins": whole(1, 1000).of("bins"),
    },
    "lathe.callbacks.Throughput": {
        "window": batches | null("one window for each logged step"),
        "skip_steps": batches,
        "peak_flops": number(above=0).of("FLOP/s") | null("what is known of the GPU"),
    },
    "lathe.callbacks.TorchProfiler": {
        "dirpath": path | null("profile/ in the run directory"),
        "wait": whole(0).of("batches"),
        "warmup": batches,
        "active": batches,
        "top_k": count.of("rows"),
        "record_shapes": flag,
        "profile_memory": flag,
        "with_stack": flag,
    },
    "lathe.callbacks.WhatIf": {
        "steps": whole(2, 1000).of("steps"),
        "at_least": number(1),
        "min_steps": whole(0).of("steps"),
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
}
