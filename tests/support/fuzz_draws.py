"""Command lines drawn to be wrong, over every key there is; `fuzz_runs.py` runs them."""

import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lathe.config.schema import key_schemas
from lathe.config.values import NODE, Json, is_valid, kinds
from support.runs import ROOT, config

QUICK = (
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "trainer.max_epochs=1",
)
FACTS = ("data.num_classes=2", "data.channels=1", "data.image_size=4")
MLP = ("model=mlp", "model.net.width=16", "model.net.depth=2")
LIT = "model.net={_target_: support.own_lightning.LitNet}"
NULLABLE: Json = {"anyOf": [NODE, {"type": "null"}]}
# What is typed by chance, whatever the key: words, numbers and structures as a shell hands them over.
JUNK = (
    "abc",
    "''",
    "' '",
    "'\u00fc\\u0000'",
    "'a\u0007b'",
    "x" * 5000,
    "-1",
    "0",
    "0.5",
    "1e400",
    "nan",
    "-inf",
    "true",
    "false",
    "null",
    "[]",
    "[1,2]",
    "[[]]",
    "{a: 1}",
    "{_target_: builtins.print}",
    "{_target_: os.getcwd}",
    "${oc.env:HOME}",
    "${nope}",
    "???",
    str(10**30),
    "1_000",
    "0x10",
    "2026-01-01",
    "'12:30'",
    "yes",
    "no",
    "on",
    "'null'",
    "'1'",
    "'1e-3'",
    "-0.0",
    "1e-320",
    "[null]",
    "{}",
    "../x",
    "/dev/null",
    "'\u202eabc'",
    "\u00e9",
    "*",
    "a.b.c",
    "auto",
    "none",
)
# What a choice needs beside it to be composed and to be small.
BESIDE = {
    "model=gpt_nano": ("data=synthetic_tokens",),
    "data=synthetic_tokens": ("model=gpt_nano",),
    "data=tokens": ("model=gpt_nano",),
    "data=fashion_mnist": (*MLP, "data.source.download=false"),
    "data=image_folder": (f"data.folder={ROOT / 'configs'}", *MLP),  # folders without images
    "data=dataset": ("data.train={_target_: support.own_datasets.Pictures}", *FACTS, *MLP),
    "data=documents": ("model=gpt_nano",),
    "data=document_files": ("model=gpt_nano",),
    "data=cifar10": (*MLP, "data.source.download=false"),
    "model=lightning": (LIT,),
    "optimizer=none": ("model=lightning", LIT),
    "compression=distill": (*MLP, "compression.distill.teacher=ema"),
}
CHOICES = {
    "model": ("mlp", "deep_mlp", "gpt_nano", "resnet20", "resnet18", "vit_tiny", "wrn40_2", "lightning"),
    "data": (
        "digits",
        "synthetic",
        "synthetic_tokens",
        "documents",
        "dataset",
        "cifar10",
        "fashion_mnist",
        "image_folder",
        "shards",
        "tokens",
    ),
    "optimizer": ("sgd", "adamw", "muon", "none"),
    "scheduler": ("constant", "cosine", "cosine_restarts", "linear", "one_cycle", "step"),
    "callbacks": ("[default,ema,early_stopping,device_stats]",),
    "compression": (
        "prune",
        "prune_nm",
        "prune_structured",
        "prune_channels",
        "lottery",
        "rigl",
        "qat",
        "ptq_static",
        "ptq_dynamic",
        "weight_only",
        "distill",
    ),
    "strategy": ("ddp", "fsdp", "pipeline", "tensor", "3d", "model_split", "deepspeed_3", "dp"),
    "precision": ("16-mixed",),
    "compile": ("default",),
    "logger": ("[tensorboard,wandb,mlflow]",),
    "debug": ("profiler",),
}
VERBS = {
    "evaluate": (),
    "receipt": (),
    "sensitivity": (),
    "profile": (),
    "serve": (),
    "predict": ("input=a.npy", "output=b.csv"),
    "compress": ("compression=ptq_static",),
    "export": ("target=[onnx,executorch,safetensors,tensorrt,torchscript,torchserve]",),
}
OTHERS = {
    "make_shards": (),
    "prepare_tokens": ("input=x",),
    "benchmark": ("suite=scaling",),
    "runs": (),
    "report": ("runs=x",),
}


@dataclass(frozen=True)
class Draw:
    """A command line, and the key that its last words are about."""

    script: str
    base: tuple[str, ...]
    words: tuple[str, ...]
    key: str
    schema: Json | None = field(default=None, hash=False, compare=False)
    added: bool = False  # a key that nothing can read

    def __str__(self) -> str:
        return " ".join([self.script, *(repr(word) if " " in word else word for word in (*self.base, *self.words))])[
            :600
        ]


@dataclass(frozen=True)
class Place:
    """A key that a choice brings, with what it takes."""

    script: str
    base: tuple[str, ...]
    key: str
    schema: Json = field(hash=False)


def written(value: Any) -> str:
    """A value as an override spells it."""
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
    """Values that do not fit: of other types, beyond each end, next to the choices, lists of other lengths."""
    found: list[Any] = ["abc", 1.5, -7, 10**30, True, None, [], [1, 2, 3], {"a": 1}, "1e-3", "", math.nan, math.inf]
    found.append({"_target_": "builtins.print"})
    for one in kinds(schema):
        step = 1 if one.get("type") == "integer" else 1e-3
        found += [one["minimum"] - step] if "minimum" in one else []
        found += [one["maximum"] + step] if "maximum" in one else []
        found += [one[end] for end in ("exclusiveMinimum", "exclusiveMaximum") if end in one]
        words = [name for name in one.get("enum", ()) if isinstance(name, str)]
        found += [f"{name}x" for name in words] + [name.upper() for name in words]
        if one.get("items"):
            least, names = one.get("minItems", 0), one["items"].get("enum", [])
            item = next((bad for bad in wrong(one["items"]) if not isinstance(bad, dict)), None)
            found += [[item] * max(least, 1), ["ab"] * (least + 1), [0.5] * max(least - 1, 0)]
            found += [[name] * 2 for name in names] + [["ab", "cd", "ab"], [7, 8, 7]]
    return [value for value in found if not is_valid(value, schema)]


def right(schema: Json) -> list[Any]:
    """Small values that fit: the choices, the lower ends of the ranges, null."""
    found: list[Any] = [None, True, False, 0, 1, 2, 3, 0.5, 0.9, 1.0, [], [1, 1], [0.5, 0.9], ["a"], ["bias"]]
    for one in kinds(schema):
        found += [*one.get("enum", ()), *([one["minimum"]] if "minimum" in one else [])]
        if one.get("items", {}).get("enum"):
            found.append([one["items"]["enum"][-1]] * max(one.get("minItems", 0), 1))
    return [value for value in found if is_valid(value, schema)]


def combined(place: Place, others: list[Place], choose: random.Random) -> Draw:
    """Two or three keys of one command line with values that each of them takes; no words where `right` has none."""
    chosen = [place, *choose.sample(others, min(len(others), choose.choice((1, 2))))]
    pairs = [(one.key, right(one.schema)) for one in chosen if right(one.schema)]
    words = tuple(f"{key}={written(choose.choice(values))}" for key, values in pairs)
    return Draw(place.script, place.base, words, place.key)


def bases() -> list[tuple[str, str, tuple[str, ...], str]]:
    """Command lines that are right: the script, its verb, its words, and the group whose keys they bring (all, where it
    is empty).
    """
    found: list[tuple[str, str, tuple[str, ...], str]] = [("train.py", "train", (*QUICK, *MLP), "")]
    for group, names in CHOICES.items():
        for choice in (f"{group}={name}" for name in names):
            net = () if group == "model" or choice in BESIDE else MLP
            words = (*QUICK, *net, *BESIDE.get(choice, ()), choice)
            found.append(("train.py", "train", words, "callbacks" if group == "debug" else group))
    found += [(f"scripts/{verb}.py", verb, ("run=RUN", *words), "") for verb, words in VERBS.items()]
    return found + [(f"scripts/{verb}.py", verb, words, "") for verb, words in OTHERS.items()]


def places(lines: list[tuple[str, str, tuple[str, ...], str]]) -> list[Place]:
    """Every key of these command lines, once for each class or group that reads it."""
    found: dict[tuple[str, str, str], Place] = {}
    for script, verb, base, group in lines:
        cfg = config(*base, name=verb)
        for key, schema in key_schemas(cfg, verb).items():
            if group and not key.startswith(f"{group}."):
                continue
            parent: Any = cfg
            for part in key.split(".")[:-1]:
                parent = parent[part]
            target = str(parent.get("_target_", key.rpartition(".")[0]))
            found.setdefault((verb, target, key.rpartition(".")[2]), Place(script, base, key, schema))
            if "_target_" in parent and key.count(".") > 1:
                found.setdefault((verb, target, ""), Place(script, base, key.rpartition(".")[0], NULLABLE))
    return list(found.values())


def structural(place: Place, choose: random.Random) -> Draw:
    """A key taken out, typed twice, put under another, added beside it."""
    parent, _, name = place.key.rpartition(".")
    under = f"{parent}." if parent else ""
    what = choose.choice(("out", "beside", "below", "again", "misspelt", "force", "twice"))
    if what == "beside":
        return Draw(place.script, place.base, (f"+{under}qqx=1",), f"{under}qqx", added=True)
    if what == "force":
        return Draw(place.script, place.base, (f"++{under}qqx=1",), f"{under}qqx", added=True)
    if what == "below":
        return Draw(place.script, place.base, (f"+{place.key}.qqx=1",), f"{place.key}.qqx", place.schema)
    words = {
        "out": (f"~{place.key}",),
        "again": (f"+{place.key}=1",),
        "misspelt": (f"{under}{name}q=1",),
        "twice": (f"{place.key}=1", f"{place.key}=abc"),
    }[what]
    return Draw(place.script, place.base, words, place.key, place.schema)


def draws(seed: int, count: int, groups: int | None = None) -> Iterator[Draw]:
    """`count` command lines: the keys in turn, in an order of their own for each seed, with a value that does not fit
    the key, one of JUNK, a change of structure, or several keys with values that each takes. `groups` limits them to
    the keys of so many choices.
    """
    choose = random.Random(seed)
    lines = bases()
    every = places(lines if groups is None else choose.sample(lines, groups))
    choose.shuffle(every)
    for index in range(count):
        place = every[index % len(every)]
        way = choose.random()
        if way < 0.4:
            near = [one for one in every if one.base == place.base and one.key != place.key]
            several = combined(place, near, choose) if way >= 0.2 else None
            yield several if several is not None and several.words else structural(place, choose)
            continue
        bad = wrong(place.schema)
        value = written(choose.choice(bad)) if way < 0.7 and bad else choose.choice(JUNK)
        yield Draw(place.script, place.base, (f"{place.key}={value}",), place.key, place.schema)


def seed() -> int:
    """LATHE_FUZZ_SEED: a number, or `clock` for another one each time; 1 where it is not set, so that a test fails by
    what was changed.
    """
    typed = os.environ.get("LATHE_FUZZ_SEED", "1")
    return time.time_ns() // 1_000_000 % 1_000_000 if typed == "clock" else int(typed)
