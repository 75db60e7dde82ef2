"""What a composed configuration must satisfy before any data or device is touched. Imports no torch: it has to answer at once."""

import copy
import difflib
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lathe.errors import UserError

# Keys that Lightning's Trainer takes in more than one type; all others keep the type of their YAML default.
SEVERAL_TYPES: dict[str, tuple[type, ...]] = {
    "resume": (str,),
    "trainer.devices": (int, str, list),
    "trainer.val_check_interval": (int, float, str),
    "trainer.limit_train_batches": (int, float),
    "trainer.limit_val_batches": (int, float),
    "trainer.limit_test_batches": (int, float),
    "trainer.limit_predict_batches": (int, float),
    "trainer.overfit_batches": (int, float),
    "trainer.fast_dev_run": (bool, int),
    "trainer.deterministic": (bool, str),
}

CPU_PROCESSES_PER_CORE = 4  # more than this on one machine is a typing mistake, not a plan


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """A clause that proposes the nearest of `options`, and lists them where there are few; empty if there are none."""
    names = sorted(str(option) for option in options)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    return f"choose one of {', '.join(names)}" if 0 < len(names) <= 40 else ""


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested dicts keyed by dotted path; a list counts as one leaf."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return leaves


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain nested dicts and lists with every interpolation resolved.

    Raises:
        UserError: an interpolation leads nowhere, or a mandatory value (`???`) is missing.
    """
    try:
        container = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        fact = re.search(r"Interpolation key 'data\.(\w+)' not found", str(error))
        if fact and str(error.full_key).startswith("model."):
            raise UserError(f"{error.full_key} follows data.{fact.group(1)}, which this data set does not declare: choose data for this "
                            "kind of model, such as data=digits for images or data=synthetic_tokens for tokens.") from error  # fmt: skip
        raise UserError(f"{error.full_key or 'the configuration'}: {str(error).splitlines()[0]}") from error
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _type_name(value: Any) -> str:
    names = {
        dict: "a group of keys",
        list: "a list",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a word",
    }
    return names.get(type(value), type(value).__name__)


def _fits(key: str, default: Any, value: Any) -> bool:
    if default is None or value is None:
        return True
    if key in SEVERAL_TYPES:
        return isinstance(value, SEVERAL_TYPES[key])
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float))
    return isinstance(value, type(default))


def check_types(typed: Sequence[str], cfg: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Holds each typed override against the type of the default it replaces.

    `typed` are the dotted keys of the overrides; `defaults` is the configuration of the same groups without them. A default of null
    says nothing about the type, and null is always taken: each YAML comment says what it does.

    Raises:
        UserError: the first value of another type than its default.
    """
    values, reference = flatten(cfg), flatten(defaults)
    for key in typed:
        for leaf in [name for name in values if name == key or name.startswith(f"{key}.")]:
            default, value = reference.get(leaf), values[leaf]
            if not _fits(leaf, default, value):
                raise UserError(
                    f"{leaf}={value!r} is {_type_name(value)}, but it takes {_type_name(default)}, such as {default!r}."
                )
        if key not in values and isinstance(reference.get(key), (int, float, str)):
            raise UserError(
                f"{key} is a group of keys here, but it takes {_type_name(reference[key])}, such as {reference[key]!r}."
            )


def require(condition: bool, sentence: str) -> None:
    """Raises UserError with `sentence` unless `condition` holds."""
    if not condition:
        raise UserError(sentence)


def check_values(cfg: dict[str, Any]) -> None:
    """Checks that need no torch: ranges and combinations of the main keys.

    Raises:
        UserError: naming the key, its value and the way out.
    """
    for group in (
        "data",
        "model",
        "optimizer",
        "trainer",
        "strategy",
        "precision",
        "compile",
        "compression",
        "callbacks",
        "logger",
    ):
        older = group == "compression" and group not in cfg  # a run from before there was any
        require(
            older or isinstance(cfg.get(group), dict),
            f"{group}={cfg.get(group)!r}: a run needs this group; choose one of the files in configs/{group}.",
        )
    seed, trainer, data = cfg.get("seed"), cfg["trainer"], cfg["data"]
    require(isinstance(seed, int) and 0 <= seed < 2**32, f"seed={seed!r}: give a whole number from 0 to 4294967295.")
    require(cfg["ckpt_mode"] in ("weights", "trainer"), f"ckpt_mode={cfg['ckpt_mode']!r}: choose weights or trainer.")
    batch_size = data.get("batch_size")
    if batch_size is not None:
        require(isinstance(batch_size, int) and batch_size > 0, f"data.batch_size={batch_size!r}: give a whole number above 0.")
    for key in ("num_nodes", "accumulate_grad_batches", "log_every_n_steps"):
        value = trainer.get(key, 1)
        require(isinstance(value, int) and value >= 1, f"trainer.{key}={value!r}: give a whole number from 1.")
    devices = trainer["devices"]
    if isinstance(devices, int):
        require(
            devices >= 1 or devices == -1,
            f"trainer.devices={devices}: give 1 or more, -1 or auto for all GPUs, or a list of GPUs.",
        )
    elif isinstance(devices, str):
        require(devices == "auto", f"trainer.devices={devices!r}: give a number, auto, or a list of GPUs such as [0,1].")
    require(trainer.get("max_epochs") is not None or trainer.get("max_steps", -1) != -1 or trainer.get("max_time") is not None,
            "trainer.max_epochs=null needs an end: set trainer.max_steps or trainer.max_time.")  # fmt: skip
    precision, precisions = cfg["precision"].get("name"), cfg["strategy"].get("precisions")
    strategy = str(cfg["strategy"].get("_target_")).rpartition(".")[2]
    require(precisions is None or precision in precisions,
            f"precision.name={precision}: strategy {strategy} takes {', '.join(precisions or [])}; choose one of them or another "
            "strategy.")  # fmt: skip
    fused, clip = cfg["optimizer"].get("fused"), trainer.get("gradient_clip_val")
    require(precision != "16-mixed" or fused is not True or not clip,
            f"optimizer.fused=true unscales the gradients of precision=16-mixed in its own step, behind trainer.gradient_clip_val={clip}: "
            "use optimizer.fused=false, or another precision.")  # fmt: skip
    known = ("auto", "cpu", "gpu", "cuda", "mps", "tpu", "hpu")
    accelerator = trainer["accelerator"]
    require(accelerator in known, f"trainer.accelerator={accelerator!r}: {did_you_mean(str(accelerator), known)}")
    require(not trainer.get("use_distributed_sampler", False),
            "trainer.use_distributed_sampler=true would shuffle validation and count padded samples twice: leave it false, Lathe's loaders "
            "shard exactly.")  # fmt: skip


def pinned(cfg: dict[str, Any]) -> dict[str, Any]:
    """A copy of a resolved configuration in which the runs and files that it starts from or learns from (`ckpt_path`, teachers) stand
    with their real, absolute paths: logs/latest leads to another run as soon as this one has begun."""
    cfg = copy.deepcopy(cfg)
    cfg["ckpt_path"] = _real(cfg.get("ckpt_path"))
    for node in (cfg.get("compression") or {}).values():
        if isinstance(node, dict) and "teacher" in node:
            node["teacher"] = _real(node["teacher"])
    return cfg


def _real(value: Any) -> Any:
    if isinstance(value, list):
        return [_real(item) for item in value]
    if isinstance(value, dict) and "weights" in value:
        return {**value, "weights": _real(value["weights"])}
    return os.path.realpath(value) if isinstance(value, str) and value != "ema" and os.path.exists(value) else value


def changes(saved: dict[str, Any], asked: dict[str, Any], own: str, ignore: Sequence[str]) -> list[str]:
    """`differences` between the configuration that a run has saved in its directory `own` and the one that is asked for. A path in the
    latter that leads to `own` was typed as logs/latest, which led elsewhere when the run began: it is no difference."""
    lines = differences(saved, pinned(asked), ignore)
    here = f" -> {os.path.realpath(own)}"
    return [line for line in lines if not (line.endswith(here) and line.split(":")[0].endswith(("ckpt_path", ".teacher")))]


def differences(old: dict[str, Any], new: dict[str, Any], ignore: Sequence[str] = ()) -> list[str]:
    """Lines `key: old -> new` for every leaf that differs, leaving out keys that equal or lie below one of `ignore`."""
    before, after = flatten(old), flatten(new)
    lines = []
    for key in sorted(before.keys() | after.keys()):
        if any(key == name or key.startswith(f"{name}.") for name in ignore):
            continue
        if before.get(key) != after.get(key):
            lines.append(f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}")
    return lines
