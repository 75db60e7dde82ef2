"""Lightning's Trainer."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lathe.config.schema.rule import Rule, count, flag, items, number, only, shown, text, whole, word

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps", "tpu", "hpu")
_batches = whole(0) | number(0, 1)  # a count, or a share of the epoch
_DURATION = text("a time limit as DD:HH:MM:SS, such as 00:12:00:00", r"\d+:\d{1,2}:\d{1,2}:\d{1,2}")
_UNITS = ("weeks", "days", "hours", "minutes", "seconds")
_LENGTH = Rule("group", item=number(0), saying=f"a group of {', '.join(_UNITS)}", words=_UNITS)

# What Lathe gives Lightning's Trainer itself: a value typed below `trainer` would not be heard.
FILLED_IN = {
    "precision": "choose precision=bf16-mixed or another file of configs/precision",
    "strategy": "choose strategy=ddp or another file of configs/strategy",
    "logger": "choose logger=tensorboard or other files of configs/logger, logger=none for none",
    "callbacks": "choose callbacks=[default,ema] or other files of configs/callbacks",
    "plugins": "precision=, strategy= and launch= choose the plug-ins",
    "default_root_dir": "set paths.log_dir",
    "barebones": "set enable_checkpointing, enable_progress_bar and enable_model_summary to false, one by one",
    "enable_autolog_hparams": "loggers receive the run's configuration whatever it is",
    "model_registry": "upload what scripts/export.py makes",
}

TRAINER: dict[str, Rule] = {
    "accelerator": word(*ACCELERATORS),
    "devices": whole(1, 1_000_000, also=[-1]) | "auto" | items(whole(0, 1_000_000), 1),
    "num_nodes": whole(1, 1_000_000),
    "max_epochs": whole(0, also=[-1]) | None,
    "min_epochs": whole(0) | None,
    "max_steps": whole(0, also=[-1]),
    "min_steps": whole(0) | None,
    "max_time": _DURATION | _LENGTH | None,
    "accumulate_grad_batches": count,
    "gradient_clip_val": number(0) | None,
    "gradient_clip_algorithm": word("norm", "value") | None,
    "limit_train_batches": _batches | None,
    "limit_val_batches": _batches | None,
    "limit_test_batches": _batches | None,
    "limit_predict_batches": _batches | None,
    "overfit_batches": _batches,
    "val_check_interval": count | number(above=0, high=1) | _DURATION | _LENGTH | None,
    "check_val_every_n_epoch": count | None,
    "num_sanity_val_steps": whole(-1) | None,
    "log_every_n_steps": count | None,
    "enable_checkpointing": flag,
    "enable_progress_bar": flag,
    "enable_model_summary": flag,
    "deterministic": flag | "warn" | None,
    "benchmark": flag | None,
    "inference_mode": flag,
    "use_distributed_sampler": Rule(
        "flag",
        words=("false",),
        saying="false, as Lathe's loaders shard exactly and Lightning's sampler would shuffle validation and count "
        "padded samples twice",
    ),
    "profiler": word("simple", "advanced", "pytorch") | None,
    "detect_anomaly": flag,
    "steps_per_call": count | "auto",
    "num_workers": whole(0, 0) | "auto",
    "prefetch_to_device": flag | "auto",
    "channels_last": flag | "auto",
    "fused_optimizer": only[False] | "auto",
    "sync_batchnorm": flag,
    "activation_checkpointing": word("none", "blocks", "sqrt", "offload") | text("every_<n>", r"every_[1-9]\d{0,5}"),
    "reload_dataloaders_every_n_epochs": whole(0),
    "fast_dev_run": flag | whole(0),
}


_ARGUMENT = re.compile(rf"`({'|'.join(TRAINER)})(?:=([^`]+))?`")
_TYPED = {"None": "null", "True": "true", "False": "false"}


def with_keys(said: str) -> str:
    """A sentence of Lightning's on one line, in which arguments of its Trainer are what they are here: keys."""

    def key(found: re.Match[str]) -> str:
        value = "" if found[2] is None else f"={_TYPED.get(found[2], found[2])}"
        return f"trainer.{found[1]}{value}"

    return _ARGUMENT.sub(key, " ".join(said.split()))


def overfitting(cfg: Mapping[str, Any]) -> Iterator[str]:
    """`overfit_batches` takes the place of two limits, in Lightning without a word."""
    trainer = cfg["trainer"]
    for key in ("limit_train_batches", "limit_val_batches") if trainer.get("overfit_batches") else ():
        limit = trainer.get(key)
        if limit not in (None, trainer["overfit_batches"]) and not (isinstance(limit, float) and limit == 1):
            yield (
                f"trainer.{key}={shown(limit)} has no effect beside trainer.overfit_batches="
                f"{shown(trainer['overfit_batches'])}, which says how many batches train and validate: drop one of the "
                "two."
            )
