"""Law 7 for random values: an invalid one is refused before the run, in one sentence with its key.

`LATHE_FUZZ_SEED=clock` draws other values each time, `LATHE_FUZZ_SEED=<the printed number>` the same ones again.
"""

import math
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.runs import QUIET, SMALL, config, new_run

import lathe.training.train
from lathe.config.schema import key_schemas
from lathe.config.values import Json, is_valid, kinds

Cli = Callable[..., tuple[int, str]]
QUICK = (*QUIET, "trainer.max_epochs=1")
MLP = ("model=mlp", "model.net.width=16", "model.net.depth=2")
GPT = ("model=gpt_nano", "data=synthetic_tokens")
GROUPS = {
    "data": ("synthetic", "cifar10", "fashion_mnist"),
    "optimizer": ("adamw", "muon"),
    "scheduler": ("cosine", "one_cycle", "step"),
    "callbacks": ("[default,ema,early_stopping,device_stats]",),
    "compression": ("prune", "prune_channels", "lottery", "rigl", "qat", "ptq_static", "weight_only"),
    "strategy": ("ddp", "fsdp", "pipeline", "tensor"),
    "compile": ("default",),
}
# Valid command lines, and the prefix of the keys drawn for each.
LINES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("train", (*QUICK, *MLP), ""),
    ("train", (*QUICK, *GPT), "model."),
    ("train", (*QUICK, *GPT), "data."),
    *(("train", (*QUICK, f"model={name}"), "model.") for name in ("resnet20", "vit_tiny", "wrn40_2")),
    *(("train", (*QUICK, *MLP, f"{group}={name}"), f"{group}.") for group, names in GROUPS.items() for name in names),
    *((verb, ("run=RUN",), "") for verb in ("evaluate", "receipt", "sensitivity", "profile", "serve")),
    ("predict", ("run=RUN", "input=a.npy", "output=b.csv"), ""),
    ("compress", ("run=RUN", "compression=ptq_static"), ""),
    ("export", ("run=RUN", "target=[onnx,torchscript]"), ""),
    ("make_shards", (), ""),
    ("report", ("runs=x",), ""),
)


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


def draws(seed: int, count: int) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """Yield `count` scripts with valid words, a key and an invalid value: the keys of all LINES in turn, shuffled."""
    choose = random.Random(seed)
    every = []
    for verb, base, begin in LINES:
        script = "train.py" if verb == "train" else f"scripts/{verb}.py"
        schemas = key_schemas(config(*base, name=verb), verb)
        every += [(script, base, key, wrong(schema)) for key, schema in schemas.items() if key.startswith(begin)]
    every = [drawn for drawn in every if drawn[3]]
    choose.shuffle(every)
    for script, base, key, values in (every * (count // len(every) + 1))[:count]:
        yield script, base, key, written(choose.choice(values))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run for the other commands."""
    cfg = new_run(tmp_path_factory.mktemp("trained") / "logs", *SMALL)
    lathe.training.train.train(cfg)
    return Path(cfg["paths"]["run_dir"])


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_a_wrong_value_of_any_key_is_refused_by_its_name(cli: Cli, trained: Path, tmp_path: Path, count: int) -> None:
    typed = os.environ.get("LATHE_FUZZ_SEED", "1")
    seed, found = time.time_ns() // 1_000_000 % 1_000_000 if typed == "clock" else int(typed), []
    for script, base, key, value in draws(seed, count):
        words = [*(word.replace("RUN", str(trained)) for word in base), f"{key}={value}"]
        code, errors = cli(*words, script=script)
        lines = errors.splitlines()
        named = any(key.rpartition(".")[2] in line for line in lines)
        if code != 1 or not named or not all(line.startswith("Error: ") for line in lines):
            found.append(f"{script} {' '.join(words)}: exit code {code}, {errors}")
    assert found == [], f"LATHE_FUZZ_SEED={seed}\n" + "\n".join(found)
    assert list(tmp_path.rglob("config.yaml")) == []


def test_a_directory_goes_with_whatever_ends_a_run_before_its_first_step(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(cfg: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lathe.training.train, "make_loggers", lambda *_: 1 / 0)
    code, errors = cli(*QUICK, *MLP)
    assert code == 1
    assert "ZeroDivisionError" in errors
    monkeypatch.setattr(lathe.training.train, "train", interrupted)
    assert cli(*QUICK, *MLP)[0] == 130
    assert list(tmp_path.rglob("config.yaml")) == []
