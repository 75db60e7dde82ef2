"""Keys of a training configuration that contradict each other, or of which one would do nothing."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from lathe.config.schema.attached import alerts, averaging, hard_samples, image_sizes, samples, whitening
from lathe.config.schema.compiled import offloading, whole_step
from lathe.config.schema.names import canonical
from lathe.config.schema.trainer import overfitting
from lathe.config.values import shown
from lathe.errors import UserError

WORKERS_PER_CORE = 16  # more reading processes than this are a typing mistake, and take a machine down
# Gives a sentence for each contradiction, or raises the first one as a UserError.
Together = Callable[[dict[str, Any]], Iterable[str] | None]


def together(rules: Iterable[Together], cfg: dict[str, Any]) -> Iterator[str]:
    """Give the sentences of `rules` about a configuration whose keys fit one by one."""
    for rule in rules:
        try:
            yield from rule(cfg) or ()
        except UserError as error:
            yield from error.args


def _end(cfg: Mapping[str, Any]) -> Iterator[str]:
    trainer = cfg["trainer"]
    if trainer.get("max_epochs") is None and trainer.get("max_steps", -1) == -1 and trainer.get("max_time") is None:
        yield "trainer.max_epochs=null needs an end: set trainer.max_steps or trainer.max_time."


def _shortest(unit: str, cfg: Mapping[str, Any]) -> Iterator[str]:
    trainer = cfg["trainer"]
    number, limit = trainer.get(f"min_{unit}"), trainer.get(f"max_{unit}")
    if number is not None and limit not in (None, -1) and number > limit:
        yield (
            f"trainer.min_{unit}={number} is above trainer.max_{unit}={limit}, which ends the run first: lower one or "
            "raise the other."
        )


def _interval(cfg: Mapping[str, Any]) -> Iterator[str]:
    interval, every = cfg["trainer"].get("val_check_interval"), cfg["trainer"].get("check_val_every_n_epoch", 1)
    if every is None and isinstance(interval, float):
        yield (
            "trainer.check_val_every_n_epoch=null counts batches across epochs, and "
            f"trainer.val_check_interval={interval} is a share "
            "of one: give a number of batches, such as trainer.val_check_interval=100."
        )


def _clipping(cfg: Mapping[str, Any]) -> Iterator[str]:
    clip, how = cfg["trainer"].get("gradient_clip_val"), cfg["trainer"].get("gradient_clip_algorithm")
    if not clip and how == "value":
        yield (
            f"trainer.gradient_clip_algorithm=value clips nothing with trainer.gradient_clip_val={shown(clip)}: set "
            "that one too, or leave this out."
        )


def _nesterov(cfg: Mapping[str, Any]) -> Iterator[str]:
    optimizer = cfg["optimizer"]
    if optimizer.get("nesterov") is True and (optimizer.get("momentum") == 0 or optimizer.get("dampening")):
        yield "optimizer.nesterov=true needs a momentum above 0 and no dampening: set optimizer.nesterov=false."


def _foreach(cfg: Mapping[str, Any]) -> Iterator[str]:
    if cfg["optimizer"].get("foreach") is True and cfg["optimizer"].get("fused") is True:
        yield "optimizer.foreach=true and optimizer.fused=true exclude each other: set one of them to null."


# keys that one way to step the parameters beside Muon's reads, and what they are where nobody says otherwise
RESTS: dict[str, dict[str, Any]] = {
    "sgd": {"sgd_lr_ratio": 1.0, "sgd_momentum": 0.9},
    "adamw": {"adamw_lr_ratio": 0.05, "adamw_betas": [0.9, 0.95], "adamw_eps": 1e-8},
}


def _rest(cfg: Mapping[str, Any]) -> Iterator[str]:
    optimizer = cfg["optimizer"]
    chosen = optimizer.get("rest")
    for rest, keys in RESTS.items():
        for key, usual in keys.items():
            if chosen in RESTS and rest != chosen and optimizer.get(key, usual) != usual:
                yield (
                    f"optimizer.{key}={shown(optimizer[key])} is for optimizer.rest={rest}, and it is {chosen}: leave "
                    f"it out, or set optimizer.rest={rest}."
                )


def _fused(cfg: Mapping[str, Any]) -> Iterator[str]:
    clip = cfg["trainer"].get("gradient_clip_val")
    if cfg["optimizer"].get("fused") is True and cfg["precision"].get("name") == "16-mixed" and clip:
        yield (
            f"optimizer.fused=true unscales the gradients of precision=16-mixed in its own step, behind "
            f"trainer.gradient_clip_val={clip}: use optimizer.fused=false, or another precision."
        )


def _start(cfg: Mapping[str, Any]) -> Iterator[str]:
    if cfg.get("ckpt_mode") == "trainer" and cfg.get("ckpt_path") is None and cfg.get("resume") is None:
        yield (
            "ckpt_mode=trainer says what is taken from ckpt_path, which is null: set ckpt_path, or leave ckpt_mode out."
        )
    address = str(cfg.get("ckpt_path"))
    if address.startswith(("http://", "https://")) and cfg.get("ckpt_sha256") is None:
        yield f"ckpt_path={address} is fetched from elsewhere: set ckpt_sha256 to the SHA-256 that the file is to have."
    for key, usual in (("ckpt_map", None), ("ckpt_strict", True), ("ckpt_sha256", None)):
        if cfg.get(key, usual) == usual:
            continue
        typed = f"{key}={shown(cfg[key])}"
        if cfg.get("ckpt_path") is None and cfg.get("resume") is None:
            yield f"{typed} is about the weights of ckpt_path, which is null: set ckpt_path, or leave {key} out."
        elif key == "ckpt_sha256":
            continue
        elif cfg.get("ckpt_mode") == "trainer":
            yield f"{typed} takes a part of the weights, ckpt_mode=trainer the whole state: use ckpt_mode=weights."


def _pretrained(cfg: Mapping[str, Any]) -> Iterator[str]:
    given = cfg["model"].get("pretrained")
    if cfg["model"].get("sha256") is not None and not isinstance(given, str):
        yield (
            f"model.sha256 is that of a file, and model.pretrained={shown(given)} names none: name one, or leave "
            "model.sha256 out."
        )
    if given not in (None, False) and cfg["model"].get("init") is not None:
        yield (
            f"model.init={shown(cfg['model']['init'])} would be lost under the weights of "
            f"model.pretrained={shown(given)}: leave one of the two out."
        )


def _devices(cfg: Mapping[str, Any]) -> Iterator[str]:
    devices = cfg["trainer"].get("devices")
    if isinstance(devices, list) and len(set(devices)) < len(devices):
        yield f"trainer.devices={devices} names a device twice: name each once."
    named = cfg["strategy"].get("devices")
    same = named == devices or (isinstance(named, list) and len(named) == devices)
    if cfg["strategy"].get("processes") == "one" and devices not in (1, -1, "auto") and not same:
        yield (
            f"trainer.devices={shown(devices)} has no say where one process drives several devices: leave it out, and "
            "name them with strategy.devices."
        )


def _workers(cfg: Mapping[str, Any]) -> Iterator[str]:
    workers, cores = cfg["data"].get("num_workers"), os.cpu_count() or 1
    most = max(32, WORKERS_PER_CORE * cores)
    if isinstance(workers, int) and workers > most:
        yield (
            f"data.num_workers={workers} would start that many processes on this machine's {cores} cores: use at "
            f"most {most}."
        )


def _precisions(cfg: Mapping[str, Any]) -> Iterator[str]:
    name, taken = cfg["precision"].get("name"), cfg["strategy"].get("precisions")
    if taken is not None and name not in (*taken, "auto"):  # which takes one that all of them have
        strategy = str(cfg["strategy"].get("_target_")).rpartition(".")[2]
        yield (
            f"precision.name={name}: strategy {strategy} takes {', '.join(taken)}; choose one of them or another "
            "strategy."
        )


def _scaling(cfg: Mapping[str, Any]) -> Iterator[str]:
    scaling = [key for key in ("init_scale", "growth_interval") if key in cfg["precision"]]
    if scaling and cfg["precision"].get("name") != "16-mixed":
        yield (
            f"precision.{scaling[0]} is of the gradient scaler that precision=16-mixed alone has: leave it out, or "
            "choose that."
        )


WHOLE = ("lathe.strategies.auto", "lathe.strategies.DDP")  # strategies that leave a net whole
OWN = "lathe.tasks.LightningTask"


def _is_own(cfg: Mapping[str, Any]) -> bool:
    return canonical(str(cfg["task"].get("_target_"))) == OWN


def _own_strategy(cfg: Mapping[str, Any]) -> Iterator[str]:
    target = canonical(str(cfg["strategy"].get("_target_")))
    if _is_own(cfg) and target.startswith("lathe.") and target not in WHOLE:
        yield (
            f"strategy._target_={target} spreads the net of a task, and task=lightning has a LightningModule as it is: "
            "use strategy=ddp, or write a task (docs/own_parts.md)."
        )


def _own_module(cfg: Mapping[str, Any]) -> Iterator[str]:
    optimizer, scheduler = cfg.get("optimizer"), cfg.get("scheduler")
    if not _is_own(cfg):
        if not optimizer:
            yield (
                "optimizer=none is for model=lightning, whose module brings its own: choose one, such as optimizer=sgd."
            )
        return
    net = cfg["model"].get("net")
    target = str(net.get("_target_")) if isinstance(net, Mapping) else ""
    if canonical(target).startswith(("lathe.nets.", "torch.nn.")):
        yield (
            f"task=lightning runs a LightningModule, and model.net._target_={target} is a net: choose model=lightning "
            "model.net={_target_: mine.LitNet}, or another task."
        )
    if scheduler and not optimizer:
        yield (
            "scheduler is made for the optimizer of the group optimizer, and optimizer=none: leave scheduler out if "
            "the module has a configure_optimizers, or choose optimizer=adamw too."
        )
    if cfg["compile"].get("enabled"):
        yield (
            "compile: torch.compile can't take a LightningModule that calls self.log: leave compile out, and call "
            "self.net.compile() in the module."
        )
    if cfg["trainer"].get("activation_checkpointing", "none") != "none":
        yield (
            f"trainer.activation_checkpointing={cfg['trainer']['activation_checkpointing']} is for the net of a task, "
            "and task=lightning has a LightningModule as it is: call torch.utils.checkpoint in the module."
        )
    made = [name for name, node in cfg["compression"].items() if isinstance(node, Mapping)]
    if made:
        yield (
            f"compression={','.join(made)} makes the net of a task small, and task=lightning has a LightningModule as "
            "it is: write a task (docs/own_parts.md)."
        )


# Those of precision and strategy, which a job on a finished run chooses anew.
CLASHES: tuple[Together, ...] = (_precisions, _scaling, _own_strategy)
CONTRADICTIONS: tuple[Together, ...] = (
    _end,
    overfitting,
    partial(_shortest, "epochs"),
    partial(_shortest, "steps"),
    _interval,
    _clipping,
    _nesterov,
    _foreach,
    _rest,
    _fused,
    _start,
    _pretrained,
    _devices,
    _workers,
    averaging,
    _own_module,
    whole_step,
    offloading,
    samples,
    alerts,
    whitening,
    hard_samples,
    image_sizes,
    *CLASHES,
)
