"""Laws 4 and 7: each edit of a saved configuration is used, or refused in one sentence."""

import copy
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import in_process
from support.runs import SMALL, new_run

import lathe.training.train

pytestmark = pytest.mark.law7

SEED = int(os.environ.get("LATHE_FUZZ_SEED", "0"))
ABSENT = object()
DAMAGES = {"absent": ABSENT, "null": None, "word": "nonsense", "list": [1, {"a": 2}], "number": -7.5, "group": {"a": 1}}
VERBS = {
    "scripts/evaluate.py": ("run={}", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false"),
    "train.py": ("resume={}",),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cfg = new_run(tmp_path_factory.mktemp("damaged") / "logs", *SMALL, "trainer.max_epochs=1")
    lathe.training.train.train(cfg)
    return Path(cfg["paths"]["run_dir"])


def keys(tree: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in tree.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from keys(value, (*above, name))


def damaged(saved: dict[str, Any], key: tuple[str, ...], value: Any) -> str:
    tree = node = copy.deepcopy(saved)
    for name in key[:-1]:
        node = node[name]
    if value is ABSENT:
        del node[key[-1]]
    else:
        node[key[-1]] = value
    return yaml.safe_dump(tree, sort_keys=False)


def try_all(
    trained: Path, count: int, seed: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> list[str]:
    """Return the wrong outcomes of `count` random edits, each with every command."""
    monkeypatch.chdir(trained.parent)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setenv("LATHE_FULL_ERROR", "0")
    path, wrong = trained / "config.yaml", []
    text, result = path.read_text(), (trained / "result.json").read_text()
    cases = [(key, what) for key in keys(yaml.safe_load(text)) for what in DAMAGES]
    try:
        for key, what in random.Random(seed).sample(cases, count):
            path.write_text(damaged(yaml.safe_load(text), key, DAMAGES[what]))
            for script, typed in VERBS.items():
                capfd.readouterr()
                code = in_process(script, *(word.format(trained) for word in typed))
                lines = [line for line in capfd.readouterr().err.splitlines() if line.strip()]
                if code and not (len(lines) == 1 and lines[0].startswith("Error: ")):
                    wrong.append(f"seed {seed}: {'.'.join(key)} {what}, {script}: {code} {lines[-1:]}")
                (trained / "result.json").write_text(result)
    finally:
        path.write_text(text)
    return wrong


def test_edited_configurations(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert try_all(trained, 6, SEED, monkeypatch, capfd) == []


@pytest.mark.slow
def test_many_edited_configurations(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert try_all(trained, 40, SEED + 1, monkeypatch, capfd) == []
