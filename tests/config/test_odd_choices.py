"""Any value of a group, and any defaults list of a YAML file, composes or is refused with a message."""

import contextlib
import io
import random
from pathlib import Path

import pytest
import yaml

from lathe.config.compose import composing
from lathe.errors import UserError

ODD = ("1", "-1", "1.5", "null", "true", "a", "''", "${seed}", "a@b", "../x", "default.yaml", "inf", "1e3", "none")


def drawn(rng: random.Random, depth: int) -> str:
    kind = rng.choice(("word", "list", "dict")) if depth else "word"
    if kind == "word":
        return rng.choice((*ODD, "default", "csv", "mlp"))
    inside = [drawn(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == "list":
        return f"[{','.join(inside)}]"
    return "{" + ",".join(f"{rng.choice(('a', '_target_', 'x'))}: {item}" for item in inside) + "}"


def test_any_value_of_a_group() -> None:
    taken, told = [], {}
    for seed in range(60):
        rng = random.Random(seed)
        word = f"{rng.choice(('callbacks', 'logger', 'compression', 'model', 'debug'))}={drawn(rng, 2)}"
        try:
            with contextlib.redirect_stdout(io.StringIO()), composing("train", [word]) as cfg:
                taken.append(cfg)
        except UserError as error:  # and nothing else
            told[word] = error.args
    assert taken
    assert told
    assert all(sentence and "Traceback" not in sentence for sentences in told.values() for sentence in sentences)


DEFAULTS = [
    {"a": "b"},
    "callbacks",
    None,
    [3],
    [None],
    [["a"]],
    [{"a": "b", "c": "d"}],
    [{"": "x"}],
    [{"override /callbacks": {"x": "y"}}],
    [{"override /callbacks": [3]}],
    [{"override /callbacks": ["default", {"x": {"_target_": "mine.X"}}]}],
    [{"override /callbacks": [["a"]]}],
    [{"override /model": 3}],
    [{"override /model": True}],
    [{"override /model": ["a"]}],
    ["own"],
    [{"/experiment": "own"}],
    ["_self_", "_self_"],
    [{"/callbacks": "ema"}],
]


def refusal(folder: Path, text: str) -> str:
    (folder / "experiment").mkdir()
    (folder / "experiment" / "own.yaml").write_text(text, encoding="utf-8")
    with (
        pytest.raises(UserError) as caught,
        composing("train", [f"hydra.searchpath=[file://{folder}]", "experiment=own"]),
    ):
        pass
    return str(caught.value)


@pytest.mark.parametrize("content", [*[{"defaults": defaults} for defaults in DEFAULTS], [1], ["a"]], ids=str)
def test_a_file_whose_defaults_can_not_be_read(tmp_path: Path, content: object) -> None:
    assert "\n" not in refusal(tmp_path, "# @package _global_\n" + yaml.safe_dump(content))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# @package _global_\ndefaults:\n  - /model: mlp\n", "'override model: mlp'"),
        ("# @package _global_\ndefaults:\n  - override model: mlp\n", "Could not override 'experiment/model@model'"),
        ("defaults:\n  - override /model: mlp\n", "own.yaml: override /model requires '# @package _global_'"),
    ],
)
def test_a_wrong_choice_in_a_file_is_named(text: str, words: str, tmp_path: Path) -> None:
    assert words in refusal(tmp_path, text)
