"""configs/schema.json is made from the tables, is current, takes every file that ships and refuses what a rule
refuses.
"""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from config.test_rule import JUNK, TAKEN
from omegaconf._utils import get_yaml_loader
from support.runs import ROOT

from lathe.config.schema.as_json import as_json, named, schema
from lathe.config.schema.check import CLASSES, canonical
from lathe.config.schema.rule import Rule
from lathe.config.schema.trainer import TRAINER

jsonschema = pytest.importorskip("jsonschema")
SCHEMA = json.loads((ROOT / "configs" / "schema.json").read_text())
WHOLE = jsonschema.Draft202012Validator(SCHEMA)


def loaded(text: str) -> Any:
    return yaml.load(text, Loader=get_yaml_loader()) or {}


def test_what_is_made_from_the_tables_is_current(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "schema.py"))
    for name in SCHEMA["files"]:  # without those that were added later, such as yours
        if (ROOT / "configs" / name).is_file():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / "configs" / name, tmp_path / name)
    assert script["stale"](tmp_path) == {}, "run python scripts/schema.py"


def test_a_schema_that_is_made_again_has_your_own_files(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "configs" / "model" / "our_own.yaml").write_text("net: {_target_: our.Net, width: 3}\n")
    assert "model/our_own.yaml" in schema(tmp_path / "configs")["files"]


@pytest.mark.slow
def test_what_is_stale_is_told() -> None:
    check = (
        "import sys, runpy, lathe.config.schema.as_json as made; made.text = lambda folder: 'x'; sys.argv = "
        "['schema.py', '--check']; runpy.run_path('scripts/schema.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "configs/schema.json is stale: python scripts/schema.py\n\n")


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", SCHEMA["files"])
def test_every_file_is_valid(name: str) -> None:
    assert WHOLE.is_valid(loaded((ROOT / "configs" / name).read_text()))


@pytest.mark.parametrize(
    "text",
    [
        "optimzer: {}",
        "max_epoch: 3",
        "{name: latest, seed: 1}",
        "max_restarts: -1",
        "trainer: {max_epochs: x}",
        "data: {batch_size: 0}",
        "{_target_: lathe.optim.build_optimizer, lr: -1}",
        "{_target_: lathe.nets.MLP, widht: 3}",
        "ema: {_target_: lathe.callbacks.ema.EMA, decay: 2}",
        "model: {net: {_target_: lathe.nets.GPT, heads: 0}}",
        "model: {net: {_target_: lathe.nets.GPT, shortcut: projection}}",
    ],
)
def test_mistakes_are_seen(text: str) -> None:
    assert not WHOLE.is_valid(loaded(text))


@pytest.mark.parametrize(
    "text",
    [
        "data: {batch_size: '${oc.env:BATCH}'}",
        "model: {net: {_target_: mine.Net, anything: goes}}",
        "{_target_: lathe.optim.build_optimizer, kind: {_target_: hydra.utils.get_class, path: mine.Lion}, anything: "
        "goes}",
        "callbacks: {mine: {_target_: mine.Callback, x: 1}, nan_guard: null}",
    ],
)
def test_what_follows_others_and_parts_of_your_own_are_taken(text: str) -> None:
    assert WHOLE.is_valid(loaded(text))


def agrees(rule: Rule) -> None:
    """A schema can't say that a word is printable, that 1.0 is no whole number, or that a number is finite."""
    schema = jsonschema.Draft202012Validator({**as_json(rule), "$defs": SCHEMA["$defs"]})
    for kind, value in JUNK.items():
        if kind not in ("blank", "nul", "line", "surrogate", "long", "huge", "nan", "inf"):
            assert schema.is_valid(value) == rule.fits(value), (rule, value)


@pytest.mark.parametrize("name", TAKEN)
def test_a_schema_takes_what_its_rule_takes(name: str) -> None:
    agrees(TAKEN[name][0])


@pytest.mark.parametrize("key", TRAINER)
def test_a_schema_takes_what_its_rule_takes_in_the_trainer(key: str) -> None:
    agrees(TRAINER[key])


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_is_meant_by_its_names(name: str) -> None:
    pattern = jsonschema.Draft202012Validator({"pattern": f"^{named(name)}$"})
    assert canonical(name) == name
    longer = name.replace("lightning.", "lightning.pytorch.callbacks.")
    assert pattern.is_valid(longer)
    assert not pattern.is_valid(f"{name}x")
    assert not pattern.is_valid(f"mine.{name}")
