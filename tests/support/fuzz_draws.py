"""Draws invalid values for every key of a command in configs/schema.json."""

import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lathe.config.schema import key_schemas
from lathe.config.values import Json, is_valid, kinds
from support.runs import config

QUICK = (
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "trainer.max_epochs=1",
)
MLP = ("model=mlp", "model.net.width=16", "model.net.depth=2")
GPT = ("model=gpt_nano", "data=synthetic_tokens")
# Valid command lines, and the prefix of the keys drawn for each.
LINES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("train", (*QUICK, *MLP), ""),
    *(("train", (*QUICK, f"model={name}"), "model.") for name in ("resnet20", "vit_tiny", "wrn40_2")),
    ("train", (*QUICK, *GPT), "model."),
    ("train", (*QUICK, *GPT), "data."),
    *(("train", (*QUICK, *MLP, f"data={name}"), "data.") for name in ("synthetic", "cifar10", "fashion_mnist")),
    *(("train", (*QUICK, *MLP, f"optimizer={name}"), "optimizer.") for name in ("adamw", "muon")),
    *(("train", (*QUICK, *MLP, f"scheduler={name}"), "scheduler.") for name in ("cosine", "one_cycle", "step")),
    ("train", (*QUICK, *MLP, "callbacks=[default,ema,early_stopping,device_stats]"), "callbacks."),
    *(
        ("train", (*QUICK, *MLP, f"compression={name}"), "compression.")
        for name in ("prune", "prune_channels", "lottery", "rigl", "qat", "ptq_static", "weight_only")
    ),
    *(("train", (*QUICK, *MLP, f"strategy={name}"), "strategy.") for name in ("ddp", "fsdp", "pipeline", "tensor")),
    ("train", (*QUICK, *MLP, "compile=default"), "compile."),
    *((verb, ("run=RUN",), "") for verb in ("evaluate", "receipt", "sensitivity", "profile", "serve")),
    ("predict", ("run=RUN", "input=a.npy", "output=b.csv"), ""),
    ("compress", ("run=RUN", "compression=ptq_static"), ""),
    ("export", ("run=RUN", "target=[onnx,torchscript]"), ""),
    ("make_shards", (), ""),
    ("report", ("runs=x",), ""),
)


@dataclass(frozen=True)
class Draw:
    """A command line whose last override has an invalid value."""

    script: str
    base: tuple[str, ...]
    key: str
    word: str
    schema: Json = field(hash=False, compare=False)


def written(value: Any) -> str:
    """Return a value as in an override."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, list):
        return f"[{','.join(written(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {written(item)}" for key, item in value.items()) + "}"
    return str(value)


def wrong(schema: Json) -> list[Any]:
    """Return invalid values: of other types, beyond each limit, similar to the choices, lists of other lengths."""
    found: list[Any] = ["abc", 1.5, -7, 10**30, True, None, [], [1, 2, 3], {"a": 1}, "1e-3", "", math.nan, math.inf]
    found.append({"_target_": "builtins.print"})
    for one in kinds(schema):
        step = 1 if one.get("type") == "integer" else 1e-3
        found += [one["minimum"] - step] if "minimum" in one else []
        found += [one["maximum"] + step] if "maximum" in one else []
        found += [one[end] for end in ("exclusiveMinimum", "exclusiveMaximum") if end in one]
        found += [f"{name}x" for name in one.get("enum", ()) if isinstance(name, str)]
        found += [["ab"] * (one.get("minItems", 0) + 1)] if one.get("items") else []
    return [value for value in found if not is_valid(value, schema)]


def draws(seed: int, count: int) -> Iterator[Draw]:
    """Yield `count` command lines: the keys of all LINES in turn, shuffled by the seed."""
    choose = random.Random(seed)
    every = []
    for verb, base, begin in LINES:
        script = "train.py" if verb == "train" else f"scripts/{verb}.py"
        schemas = key_schemas(config(*base, name=verb), verb)
        every += [(script, base, key, schema) for key, schema in schemas.items() if key.startswith(begin)]
    every = [place for place in every if wrong(place[3])]
    choose.shuffle(every)
    for index in range(count):
        script, base, key, schema = every[index % len(every)]
        yield Draw(script, base, key, f"{key}={written(choose.choice(wrong(schema)))}", schema)


def seed() -> int:
    """Return LATHE_FUZZ_SEED: a number, or a new one for `clock`. By default 1, so that only changes fail tests."""
    typed = os.environ.get("LATHE_FUZZ_SEED", "1")
    return time.time_ns() // 1_000_000 % 1_000_000 if typed == "clock" else int(typed)
