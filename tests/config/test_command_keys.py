"""The keys of each command are checked before the command runs."""

from functools import cache
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.runs import config

from lathe.config.validate import check


@cache
def composed(verb: str) -> Any:
    words = {
        "benchmark": ["suite=scaling"],
        "export": ["run=a", "target=aot_inductor"],
        "prepare_tokens": ["input=a", "output=b"],
    }
    return OmegaConf.create(config(*words.get(verb, ["run=a"]), name=verb))


@pytest.mark.parametrize(
    ("verb", "key", "value", "words"),
    [
        ("export", "target.split", "train", "test or val"),
        ("export", "target.max_drop", -1, "a number from 0 or null"),
        ("export", "target.aot_inductor.integers", 8, "true or false or null"),
        ("sensitivity", "bits", [1], "a list (each a whole number from 2 to 8)"),
        ("benchmark", "threads", [0], "a whole number from 1, a list of 1 or more items"),
        ("prepare_tokens", "separator", "", "the text between two documents or null"),
        ("prepare_tokens", "split_seed", 1.5, "a whole number from 0"),
    ],
)
def test_a_wrong_value_of_a_command(verb: str, key: str, value: Any, words: str) -> None:
    asked = composed(verb).copy()
    OmegaConf.update(asked, key, value)
    (message,) = [s for s in check(OmegaConf.to_container(asked), verb) if s.startswith(f"{key}=")]  # type: ignore[arg-type]
    assert f": expected {words}" in message


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("target.aot_inductor.opzet", "target.aot_inductor.opzet: unknown key in target.aot_inductor; "),
        ("target.onxn", "target.onxn: unknown key in target; did you mean onnx?"),
        ("target.sampels", "target.sampels: unknown key in target; did you mean samples?"),
    ],
)
def test_an_unknown_key_of_an_export_target(key: str, sentence: str) -> None:
    asked = composed("export").copy()
    OmegaConf.update(asked, key, 1, force_add=True)
    assert [told for told in check(OmegaConf.to_container(asked), "export") if told.startswith(sentence)]  # type: ignore[arg-type]
