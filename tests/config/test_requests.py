"""What is asked of a verb is held against its table before the verb sees it."""

from functools import cache
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.runs import config

from lathe.config.composed import check


@cache
def composed(verb: str) -> Any:
    words = {
        "benchmark": ["suite=scaling"],
        "export": ["run=a", "target=aot_inductor"],
        "predict": ["run=a", "input=b", "output=c"],
        "prepare_tokens": ["input=a", "output=b"],
        "support": [],
    }
    return OmegaConf.create(config(*words.get(verb, ["run=a"]), name=verb))


@pytest.mark.parametrize(
    ("verb", "key", "value", "words"),
    [
        ("export", "target.split", "train", "test or val"),
        ("export", "target.samples", 0, "a whole number from 1 or null"),
        ("export", "target.samples", 2.5, "a whole number from 1 or null"),
        ("export", "target.samples", True, "a whole number from 1 or null"),
        ("export", "target.tolerance", 0, "a number above 0 or null"),
        ("export", "target.tolerance", "tight", "a number above 0 or null"),
        ("export", "target.agreement", 2, "a number from 0 to 1 or null"),
        ("export", "target.max_drop", -1, "a number from 0 or null"),
        ("export", "target.preprocess", 1, "true or false"),
        ("export", "target.aot_inductor.integers", 8, "true or false or null"),
        ("export", "batch_size", 0, "a whole number from 1"),
        ("evaluate", "batch_size", 0, "a whole number from 1"),
        ("evaluate", "split", "valid", "train, val or test"),
        ("predict", "batch_size", 0, "a whole number from 1"),
        ("receipt", "effort", "all", "quick or full"),
        ("support", "part", "some", "plain, compression or all"),
        ("sensitivity", "sparsities", [1.0], "a list (each a number from 0 and below 1)"),
        ("sensitivity", "bits", [1], "a list (each a whole number from 2 to 8)"),
        ("sensitivity", "limit_batches", 0, "a whole number from 1 or null"),
        ("sensitivity", "reestimate", -1, "a whole number from 0"),
        ("sensitivity", "allocate", "x", "bits or sparsity"),
        ("sensitivity", "budget", 0, "a number above 0 or null"),
        ("profile", "steps", 1, "a whole number from 2"),
        ("profile", "warmup", 0, "a whole number from 1"),
        ("benchmark", "suite", "scalling", "scaling, memory"),
        ("benchmark", "processes", [0], "a list of 1 or more items (each a whole number from 1)"),
        ("benchmark", "steps", 1, "a whole number from 3 or null"),
        ("benchmark", "rounds", 0, "a whole number from 1 or null"),
        ("benchmark", "seconds", 0, "a number above 0 or null"),
        ("benchmark", "batches", [], "a list of 1 or more items"),
        ("benchmark", "seconds", 0, "a number above 0"),
        ("benchmark", "threads", [0], "a whole number from 1, a list of 1 or more items"),
        ("prepare_tokens", "suffixes", [], "a list of 1 or more items"),
        ("prepare_tokens", "suffixes", ".txt", "a list of 1 or more items"),
        ("prepare_tokens", "separator", "", "the text between two documents or null"),
        ("prepare_tokens", "val_share", 0, "a number above 0 and below 1"),
        ("prepare_tokens", "test_share", -0.5, "a number above 0 and below 1"),
        ("prepare_tokens", "split_seed", 1.5, "a whole number from 0"),
        ("serve", "threads", 0, "a whole number from 1 or null"),
    ],
)
def test_a_request_that_can_not_be_is_told(verb: str, key: str, value: Any, words: str) -> None:
    asked = composed(verb).copy()
    OmegaConf.update(asked, key, value)
    (told,) = [s for s in check(OmegaConf.to_container(asked), verb) if s.startswith(f"{key}=")]  # type: ignore[arg-type]
    assert f": expected {words}" in told


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("target.aot_inductor.opzet", "target.aot_inductor.opzet: unknown key in target.aot_inductor; "),
        ("target.onxn", "target.onxn: unknown key in target; did you mean onnx?"),
        ("target.sampels", "target.sampels: unknown key in target; did you mean samples?"),
    ],
)
def test_an_option_that_no_target_has_is_told(key: str, sentence: str) -> None:
    asked = composed("export").copy()
    OmegaConf.update(asked, key, 1, force_add=True)
    assert [told for told in check(OmegaConf.to_container(asked), "export") if told.startswith(sentence)]  # type: ignore[arg-type]
