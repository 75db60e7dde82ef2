"""Validate a resolved configuration before any data or device is used. Imports no torch.

Every key is compared with its schema. If all fit, the cross-checks follow: one small function for each subject gives a
message for each mistake that two or more keys make together, or raises a UserError.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from lathe.config.compression_plan import KINDS, check_stages, methods
from lathe.config.override_parsing import key_of
from lathe.config.resolve import flatten
from lathe.config.schema import Problem, canonical, command_keys, key_schemas, problems
from lathe.config.values import kind_of, shown
from lathe.errors import UserError, require

CrossCheck = Callable[[dict[str, Any]], Iterable[str] | None]
Config = Mapping[str, Any]
GROUPS = ("data", "task", "model", "optimizer", "trainer", "strategy", "precision", "compile", "callbacks", "logger")
REBUILT = ("data", "task", "model", "trainer", "strategy", "precision")  # groups that a job on a finished run builds
SPLIT_NETS = ("Pipeline", "ThreeD")  # strategies that split a net between processes
KEEP_ACTIVATIONS = ("auto", "DDP", "FSDP", "ModelSplit")  # strategies whose activations are plain tensors
KEEP_MODULES = ("lathe.strategies.auto", "lathe.strategies.DDP")  # strategies that leave a net as it is
OWN_MODULE = "task=lightning has a LightningModule as it is"
# For each group: keys that are read only if another key of the group has a certain value.
_MASKS = (("jumps", "schedule", "stepped"), ("batches", "criterion", "wanda"), ("seed", "criterion", "random"))
READ_WITH: dict[str, tuple[tuple[str, str, str], ...]] = {
    "optimizer": (
        *((f"sgd_{key}", "rest", "sgd") for key in ("lr_ratio", "momentum")),
        *((f"adamw_{key}", "rest", "adamw") for key in ("lr_ratio", "betas", "eps")),
    ),
    "compression.prune": (*_MASKS, ("block", "granularity", "block")),
    "compression.prune_structured": (*_MASKS, ("norm", "criterion", "magnitude")),
    "compression.prune_nm": _MASKS,
    "compression.qat": (("percentile", "observer", "percentile"),),
    "compression.ptq_static": (("percentile", "observer", "percentile"),),
}


def check(
    cfg: dict[str, Any],
    verb: str = "train",
    rules: Iterable[CrossCheck] | None = (),
    raw: Any = None,
    saved: Literal["run", "parts"] | None = None,
    more: Iterable[Problem] = (),
) -> list[str]:
    """Return a message for each mistake in a resolved configuration; each begins with its key.

    Keys are checked one by one; if all fit, `CROSS_CHECKS` and these `rules` follow (None: neither). `raw` is the
    configuration before it was resolved: a key that follows a wrong one is not reported. `more` are further mistakes
    of single keys. Of a `saved` configuration, "parts" checks only the groups that a job on a run directory builds.
    """
    is_training = command_keys("train", {}).keys() <= command_keys(verb, cfg).keys()
    is_saved = saved is not None
    keys = {key: value for key, value in cfg.items() if saved != "parts" or key in REBUILT}
    followed: dict[str, set[str]] = {}  # by key: those that its unresolved value interpolates
    for key, value in flatten(raw).items():
        inside = " ".join(re.findall(r"\$\{([^}]*)\}", str(value)))
        followed[key] = set(re.findall(r"\w+(?:\.\w+)*", inside))
    read = None if raw is None else {name.split(".")[0] for names in followed.values() for name in names}
    wrong: dict[str, str] = {}
    for group in GROUPS if is_training else ():
        if not isinstance(cfg.get(group), dict) and (is_saved or group in cfg):
            wrong[group] = (
                f"{group}={shown(cfg.get(group))}: a run needs this group; choose one of the files in "
                f"configs/{group}, in a YAML file by - override /{group}: <name> in its defaults."
            )
    for key, message in [*problems(keys, verb, read, is_saved), *more]:
        wrong.setdefault(key, message)
    messages = []
    for key, message in wrong.items():
        names = key.split(".")
        parents = {".".join(names[:end]) for end in range(1, len(names))}
        if not (followed.get(key, set()) | parents) & wrong.keys():
            messages.append(message)
    if rules is None or wrong:
        return messages
    shipped = (SAVED_RUN_CHECKS if is_saved else CROSS_CHECKS) if is_training else ()
    for rule in (*shipped, *rules):
        try:
            messages += rule(cfg) or ()
        except UserError as error:
            messages += error.args
    return messages


def check_types(
    typed: Sequence[str], cfg: dict[str, Any], defaults: dict[str, Any], verb: str = "train"
) -> Iterator[Problem]:
    """Compare the types of overridden keys that the schema does not know with those of their defaults.

    `typed` are the dotted keys of the overrides, `defaults` the configuration without them. A default of null has
    no type, and null fits every key.
    """
    values, defaults, known = flatten(cfg), flatten(defaults), key_schemas(cfg, verb)
    for key in typed:
        below = [name for name in values if f"{name}.".startswith(f"{key}.")]
        for name in below:
            default, value = defaults.get(name), values[name]
            kinds = (int, float) if type(default) is float else type(default)
            fits = isinstance(value, kinds) and isinstance(value, bool) == isinstance(default, bool)
            if name not in known and not (fits or default is None or value is None):
                yield name, f"{name}={shown(value)}: expected {kind_of(default)}, such as {shown(default)}."
        default = defaults.get(key)
        if not below:
            yield key, f"{key}: it was typed, and another word leaves it out: keep one of the two."
        elif key not in values and isinstance(default, (int, float, str)):
            yield key, f"{key} is a group of keys here: expected {kind_of(default)}, such as {shown(default)}."


def unused_keys(typed: Sequence[str], cfg: Config) -> Iterator[tuple[str, str]]:
    """Give the key and a message for each override that has no effect."""
    for group, rules in READ_WITH.items():
        section = _value_at(cfg, group)
        for name, other, value in rules if isinstance(section, Mapping) else ():
            key = f"{group}.{name}"
            word = next((item for item in typed if key_of(item) == key), None)
            if word is not None and other in section and section[other] != value:
                yield (
                    key,
                    f"{word} has no effect: it is read with {group}.{other}={value}, and here that is "
                    f"{section[other]}. Leave it out.",
                )


# The cross-checks


def lengths(cfg: Config) -> Iterator[str]:
    trainer, workers = cfg["trainer"], cfg["data"].get("num_workers")
    if trainer.get("max_epochs") is None and trainer.get("max_steps", -1) == -1 and trainer.get("max_time") is None:
        yield "trainer.max_epochs=null needs an end: set trainer.max_steps or trainer.max_time."
    for unit in ("epochs", "steps"):
        least, most = trainer.get(f"min_{unit}"), trainer.get(f"max_{unit}")
        if least is not None and most not in (None, -1) and least > most:
            yield f"trainer.min_{unit}={least} is above trainer.max_{unit}={most}, which ends the run first."
    if isinstance(workers, int) and workers > 512:  # a typing mistake, which would take a machine down
        yield f"data.num_workers={workers} would start that many processes. Use at most 512."


def gradient_clipping(cfg: Config) -> Iterator[str]:
    clip = cfg["trainer"].get("gradient_clip_val")
    if not clip and cfg["trainer"].get("gradient_clip_algorithm") == "value":
        yield f"trainer.gradient_clip_algorithm=value clips nothing with trainer.gradient_clip_val={shown(clip)}."
    if cfg["optimizer"].get("fused") is True and cfg["precision"].get("name") == "16-mixed" and clip:
        yield (
            "optimizer.fused=true unscales the gradients of precision=16-mixed after they were clipped by "
            f"trainer.gradient_clip_val={clip}: use optimizer.fused=false."
        )


def precision(cfg: Config) -> Iterator[str]:
    name, accepted = cfg["precision"].get("name"), cfg["strategy"].get("precisions")
    if accepted is not None and name not in (*accepted, "auto"):
        yield f"precision.name={name}: strategy {_class_name(cfg['strategy'])} takes {', '.join(accepted)}. Choose one."
    keys = [key for key in ("init_scale", "growth_interval") if key in cfg["precision"]]
    if keys and name != "16-mixed":
        yield f"precision.{keys[0]} is of the gradient scaler, which only precision=16-mixed has. Leave it out."


def initial_weights(cfg: Config) -> Iterator[str]:
    path, is_trainer = cfg.get("ckpt_path"), cfg.get("ckpt_mode") == "trainer"
    resumes = path is not None or cfg.get("resume") is not None
    if is_trainer and not resumes:
        yield "ckpt_mode=trainer requires ckpt_path."
    if str(path).startswith(("http://", "https://")) and cfg.get("ckpt_sha256") is None:
        yield f"ckpt_path={path} is downloaded: set ckpt_sha256 to the SHA-256 of the file."
    for key, default in (("ckpt_map", None), ("ckpt_strict", True), ("ckpt_sha256", None)):
        value = cfg.get(key, default)
        if value != default and not resumes:
            yield f"{key}={shown(value)} has no effect without ckpt_path: set ckpt_path, or leave {key} out."
    model = cfg["model"]
    weights = model.get("pretrained")
    if weights not in (None, False) and model.get("init") is not None:
        yield f"model.init={shown(model['init'])} would be lost under model.pretrained={shown(weights)}: keep one."


def devices(cfg: Config) -> Iterator[str]:
    devices, own = cfg["trainer"].get("devices"), cfg["strategy"].get("devices")
    if isinstance(devices, list) and len(set(devices)) < len(devices):
        yield f"trainer.devices={devices} names a device twice: name each once."
    is_same = own == devices or (isinstance(own, list) and len(own) == devices)
    if cfg["strategy"].get("processes") == "one" and devices not in (1, -1, "auto") and not is_same:
        yield f"trainer.devices={shown(devices)} has no effect with one process: use strategy.devices."
    ours = _package(cfg["data"]) == "lathe.data" and _class_name(cfg["data"]) != "ModuleDataModule"
    if cfg["trainer"].get("use_distributed_sampler") and ours:
        yield "trainer.use_distributed_sampler=true: expected false, as Lathe's own data are divided exactly."


def callbacks(cfg: Config) -> Iterator[str]:
    strategy = _class_name(cfg["strategy"])
    is_zero3 = strategy == "DeepSpeed" and cfg["strategy"].get("stage") == 3
    for name in _callbacks(cfg, "EMA") if strategy in SPLIT_NETS or is_zero3 else ():
        yield f"callbacks.{name} needs a whole net, and strategy {strategy} cuts it. Use strategy=fsdp or ddp."
    for name, node in _callbacks(cfg, "Samples").items():
        if node.get("split") == "test" and cfg.get("test") is False:
            yield f"callbacks.{name}.split=test comes with the run's test, and test=false: use split=val."


def activation_offload(cfg: Config) -> Iterator[str]:
    key = "trainer.activation_checkpointing"
    if cfg["trainer"].get("activation_checkpointing", "none") != "offload":
        return
    if cfg["compile"].get("enabled"):
        yield f"{key}=offload acts between operations, which compile makes one: use compile=none or {key}=blocks."
    strategy = _class_name(cfg["strategy"])
    if _package(cfg["strategy"]) == "lathe.strategies" and strategy not in KEEP_ACTIVATIONS:
        yield f"{key}=offload works with strategy=auto, ddp, fsdp and model_split, not with {strategy}: use blocks."


def lightning_module_strategy(cfg: Config) -> Iterator[str]:
    strategy, target = cfg["strategy"], _target(cfg["strategy"])
    if _is_lightning_module(cfg) and _package(strategy) == "lathe.strategies" and target not in KEEP_MODULES:
        yield f"strategy._target_={target} spreads the net of a task, and {OWN_MODULE}: use strategy=ddp."


def lightning_module(cfg: Config) -> Iterator[str]:
    optimizer, net = cfg.get("optimizer"), cfg["model"].get("net")
    if not _is_lightning_module(cfg):
        if not optimizer:
            yield "optimizer=none is for model=lightning, whose module has its own: choose one, such as optimizer=sgd."
        return
    if _package(net) in ("lathe.nets", "torch.nn"):
        yield (
            f"task=lightning runs a LightningModule, and model.net._target_={_target(net)} is a net. Choose "
            "model=lightning model.net={_target_: mine.LitNet}."
        )
    if cfg.get("scheduler") and not optimizer:
        yield "scheduler needs an optimizer, and optimizer=none: leave it out, or choose optimizer=adamw too."
    if cfg["compile"].get("enabled") and cfg["compile"].get("scope", "net") != "net":
        yield f"compile.scope=step compiles the loss of a task, and {OWN_MODULE}: use compile.scope=net."
    if "lottery" in methods(cfg["compression"]):
        yield f"compression=lottery restarts the schedule of a task, and {OWN_MODULE}: use compression=prune."


def compilation(cfg: Config) -> Iterator[str]:
    options, trainer = cfg["compile"], cfg["trainer"]
    is_none = not (options.get("enabled") or "mode" in options)
    for name, value in options.items() if is_none else ():
        if name != "enabled":
            yield (
                f"compile.{name}={value} has no effect with compile=none. Add compile=default, or ~compile.{name} "
                "where an experiment sets it."
            )
    if not options.get("enabled") or options.get("scope", "net") != "step":
        return
    # options that act within a step do not work where the whole step is one compiled function
    target, devices = cfg["strategy"].get("_target_"), trainer["devices"]
    several = len(devices) > 1 if isinstance(devices, list) else devices not in (1, -1, "auto")
    if target not in (None, "lathe.strategies.auto") or several or trainer["num_nodes"] != 1:
        yield "compile.scope=step is for one process: use strategy=auto and trainer.devices=1."
    is_wrong = {
        "trainer.accumulate_grad_batches": trainer["accumulate_grad_batches"] != 1,
        "trainer.steps_per_call": trainer.get("steps_per_call") == 1,
        "trainer.activation_checkpointing": trainer.get("activation_checkpointing", "none") != "none",
        "compile.regional": options.get("regional") is True,
    }
    unsupported = [f"{key}={shown(_value_at(cfg, key))}" for key, wrong in is_wrong.items() if wrong]
    unsupported += ["precision=16-mixed"] if cfg["precision"]["name"] == "16-mixed" else []
    after_a_step = ("prune", "prune_nm", "prune_structured")
    unsupported += [f"compression={name}" for name in methods(cfg["compression"]) if name not in after_a_step]
    for word in unsupported:
        yield f"{word} does not work with compile.scope=step, where the step is one function. Use compile.scope=net."


def check_compression(cfg: Config) -> None:
    """Check the methods of compression: their order, which of them exclude each other, the strategy, the stages."""
    nodes = methods(cfg.get("compression") or {})
    for name, node in nodes.items():
        kind = node.get("kind")
        require(kind in KINDS, f"compression.{name}.kind={kind!r}: choose one of {', '.join(KINDS)}.")
    kinds = {name: node["kind"] for name, node in nodes.items()}
    names, ordered = list(nodes), sorted(nodes, key=lambda name: KINDS.index(kinds[name]))
    typed = f"compression=[{','.join(names)}]"
    require(names == ordered, f"{typed} is out of order: write compression=[{','.join(ordered)}].")
    for kind, what in (("structure", "channels"), ("masks", "weights"), ("quantization", "layers")):
        same = [name for name in names if kinds[name] == kind]
        require(len(same) < 2, f"{typed} has {' and '.join(same)}, which decide over the same {what}: keep one.")
    is_once = not {"quantization", "after"} <= set(kinds.values())
    require(is_once, f"{typed} quantizes in training and again after it: keep one of them.")
    pruning = ",".join(name for name in names if kinds[name] in ("structure", "masks"))
    frozen = cfg.get("freeze")
    require(not (frozen and pruning), f"freeze={frozen} keeps what compression={pruning} would cut: keep one of them.")
    late = ",".join(name for name in names if kinds[name] == "after" or nodes[name].get("mode") == "gradual")
    trainer, callbacks = cfg.get("trainer", {}), cfg.get("callbacks", {"checkpoint": {}})  # compress.py has none
    is_kept = trainer.get("enable_checkpointing", True) and callbacks.get("checkpoint") is not None
    message = f"compression={late} acts on best.ckpt after training, and this run keeps none. Keep checkpoints."
    require(is_kept or not late or bool(trainer.get("fast_dev_run")), message)
    accepted = cfg["strategy"].get("compressions")
    for name in names:
        limit = f"strategy {_class_name(cfg['strategy'])} takes {' and '.join(accepted or []) or 'no'} compression"
        is_accepted = accepted is None or kinds[name] in accepted
        require(is_accepted, f"compression={name}: {limit}; choose another strategy, such as ddp.")
    check_stages(cfg.get("compression") or {})


def _value_at(cfg: Config, key: str) -> Any:
    value: Any = cfg
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _target(node: Any) -> str:
    return canonical(str(node.get("_target_"))) if isinstance(node, Mapping) else ""


def _package(node: Any) -> str:
    return _target(node).rpartition(".")[0]


def _class_name(node: Config) -> str:
    return str(node.get("_target_")).rpartition(".")[2]


def _callbacks(cfg: Config, name: str) -> dict[str, Any]:
    """Return the nodes of a callback of ours by their keys."""
    return {key: node for key, node in cfg["callbacks"].items() if node and _target(node) == f"lathe.callbacks.{name}"}


def _is_lightning_module(cfg: Config) -> bool:
    return _target(cfg["task"]) == "lathe.tasks.LightningTask"


# Checks of what a command on a finished run chooses again.
SAVED_RUN_CHECKS: tuple[CrossCheck, ...] = (precision, lightning_module_strategy)
CROSS_CHECKS: tuple[CrossCheck, ...] = (
    *(lengths, gradient_clipping, initial_weights, devices, callbacks, activation_offload, lightning_module),
    *(compilation, *SAVED_RUN_CHECKS),
)
