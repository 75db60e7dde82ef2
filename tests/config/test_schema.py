"""configs/schema.json is current, takes every file that ships, and refuses what no signature takes."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.utils import get_object
from omegaconf._utils import get_yaml_loader
from support.runs import ROOT, config

from lathe.config.schema import canonical, component_keys, definitions, problems
from lathe.verbs.schema import Schema, name_pattern, text

jsonschema = pytest.importorskip("jsonschema")
SCHEMA = json.loads((ROOT / "configs" / "schema.json").read_text())
WHOLE = jsonschema.Draft202012Validator(SCHEMA)


def loaded(text: str) -> Any:
    return yaml.load(text, Loader=get_yaml_loader()) or {}


def test_the_schema_is_current(tmp_path: Path) -> None:
    for name in SCHEMA["files"]:  # without those that were added later, such as yours
        if (ROOT / "configs" / name).is_file():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / "configs" / name, tmp_path / name)
    made = text(Schema(tmp_path, SCHEMA["packages"]).build())
    assert made == (ROOT / "configs" / "schema.json").read_text(), "run python scripts/schema.py"
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.slow
def test_your_own_package_is_checked_before_anything_is_built(tmp_path: Path) -> None:
    """Its signatures are in the schema once schema.py has read them."""
    clone = tmp_path / "clone"
    left = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "logs", "data", "*.egg-info", ".venv*", "tests")
    shutil.copytree(ROOT, clone, ignore=lambda path, names: left(path, names) if Path(path) == ROOT else [])
    (clone / "src" / "wide").mkdir()
    (clone / "src" / "wide" / "nets.py").write_text(
        "from typing import Annotated\nfrom pydantic import Field\nfrom torch import nn\n\n"
        "class Net(nn.Linear):\n    def __init__(self, width: Annotated[int, Field(ge=1)]):\n"
        "        super().__init__(width, 10)\n"
    )
    net = "model.net={_target_: wide.nets.Net, width: -1}"
    environment = {"PYTHONPATH": str(clone / "src"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *command], cwd=clone, env=environment, capture_output=True, text=True)

    assert run("scripts/schema.py", "package=wide").returncode == 0
    done = run("train.py", net)
    assert done.returncode == 1
    assert "model.net.width=-1: expected a whole number from 1." in done.stderr
    assert not (clone / "logs").exists()


def test_every_file_is_valid() -> None:
    assert [name for name in SCHEMA["files"] if not WHOLE.is_valid(loaded((ROOT / "configs" / name).read_text()))] == []


@pytest.mark.parametrize(
    "text",
    [
        "optimzer: {}",
        "{name: latest, seed: 1}",
        "data: {batch_size: 0}",
        "{_target_: lathe.nets.MLP, widht: 3}",
        "ema: {_target_: lathe.callbacks.ema.EMA, decay: 2}",
        "model: {net: {_target_: lathe.nets.GPT, shortcut: projection}}",
    ],
)
def test_editors_see_mistakes(text: str) -> None:
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
def test_interpolations_and_your_own_classes_are_valid(text: str) -> None:
    assert WHOLE.is_valid(loaded(text))


def test_a_component_is_meant_by_its_names() -> None:
    for name in [name for name in definitions() if component_keys(name) is not None]:
        pattern = jsonschema.Draft202012Validator({"pattern": f"^{name_pattern(name)}$"})
        assert canonical(name) == name
        assert pattern.is_valid(name.replace("lightning.", "lightning.pytorch.callbacks."))
        assert not pattern.is_valid(f"{name}x")
        assert not pattern.is_valid(f"mine.{name}")
    assert canonical("lathe.callbacks.ema.EMA") == "lathe.callbacks.EMA"
    assert canonical("pytorch_lightning.Trainer") == "lightning.Trainer"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["~trainer.enable_progress_bar"], "trainer.enable_progress_bar is missing"),
        (
            ["optimizer.kind.path=torch.optim.NAdam"],
            "optimizer.momentum: torch.optim.NAdam takes no such option; leave it out with "
            "optimizer.momentum=null; did you mean momentum_decay?",
        ),
        (["~task._target_"], "task has no _target_: choose one of the files in configs/task"),
    ],
)
def test_a_mistake_is_one_sentence(change: list[str], sentence: str) -> None:
    key, said = next(problems(config(*change), "train", read=()))
    assert said.startswith(sentence)
    assert said.startswith(key)


def test_keys_that_others_read_and_classes_of_yours_are_taken() -> None:
    own = config("optimizer.kind.path=mine.Lion", "+optimizer.anything=goes", "callbacks.nan_guard._target_=mine.Guard")
    assert list(problems(own, "train")) == []
    cfg = config("+width=24", "model.net.width=${width}")
    assert list(problems(cfg, "train", read={"width"})) == []


def test_the_schema_has_components_by_their_public_names() -> None:
    """As lathe.<package>.<Name> in the `__all__` of the package."""
    for name in [name for name in definitions() if name.startswith("lathe.") and component_keys(name)]:
        _, package, last = name.split(".")
        assert last in importlib.import_module(f"lathe.{package}").__all__
        assert callable(get_object(name))


def test_all_public_names_can_be_imported() -> None:
    """Also the names that are imported lazily."""
    for file in sorted((ROOT / "src" / "lathe").glob("*/__init__.py")):
        package = importlib.import_module(f"lathe.{file.parent.name}")
        assert [name for name in getattr(package, "__all__", ()) if not hasattr(package, name)] == []
