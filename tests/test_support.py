"""What the tests stand on: composing once gives what Hydra gives each time."""

import copy
import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, MissingConfigException
from lightning.fabric.utilities import registry
from omegaconf import OmegaConf
from support import composing, quick
from support.commands import command, environment, start
from support.processes import Command, server
from support.runs import ROOT, config

from lathe.errors import UserError
from lathe.runs import environment as recorded
from lathe.trust.safe_yaml import read_yaml


@pytest.fixture(autouse=True)
def _once() -> Iterator[None]:
    yield
    composing.once()


def composed(name: str, *words: str, folder: Path = ROOT / "configs") -> dict[str, Any]:
    with initialize_config_dir(str(folder), version_base="1.3"):
        cfg = compose(name, overrides=list(words), return_hydra_config=True)
    assert OmegaConf.is_struct(cfg)
    return OmegaConf.to_container(cfg, resolve=False)  # type: ignore[return-value]


def nodes(node: Any, parent: Any = None) -> Any:
    """All that omegaconf knows of a configuration, values and flags among it; each node has the parent it stands in."""
    assert node._get_parent() is parent
    metadata, flags = node._metadata, [node._get_flag(name) for name in ("struct", "readonly", "allow_objects")]
    known = (type(node), metadata.key, metadata.type_hint, metadata.object_type, metadata.flags, metadata.flags_root)
    content = node.__dict__.get("_content", node._value())
    if isinstance(content, dict):
        return known, flags, {key: nodes(value, node) for key, value in content.items()}
    if isinstance(content, list):
        return known, flags, [nodes(value, node) for value in content]
    return known, flags, content


def test_a_copy_is_what_omegaconf_copies() -> None:
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", overrides=["model=mlp"], return_hydra_config=True)
    OmegaConf.set_readonly(cfg.model, True)
    ours, below = copy.deepcopy(cfg), copy.deepcopy(cfg.model)
    composing.anew()
    theirs = copy.deepcopy(cfg)
    assert nodes(ours) == nodes(theirs) == nodes(cfg)
    assert nodes(below, cfg) == nodes(copy.deepcopy(cfg.model), cfg)
    OmegaConf.set_readonly(ours.model, False)
    ours.model.net.depth = 77
    assert nodes(theirs) == nodes(cfg) != nodes(ours)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train", []),
        ("train", ["name='a b'", 'tags=["a,b",c]', "seed=null"]),
        ("train", ["model=mlp", "seed=7", "+trainer.x=[1,2]", "~model.net.depth"]),
        ("train", ["model=mlp", "seed=8"]),
        ("train", ["callbacks=[default,ema]", "experiment=digits_small", "callbacks.ema.decay=0.5"]),
        ("export", ["run=logs/latest", "target=[onnx,onnx_int8]"]),
    ],
)
def test_what_is_kept_is_what_hydra_composes(name: str, words: list[str]) -> None:
    composing.anew()
    alone = composed(name, *words)
    composing.once()
    for _ in range(3):
        found = composed(name, *words)
        assert found == alone
        found["trainer"]["max_epochs"] = "changed"  # of a copy
    for _ in range(2):
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            theirs, ours = compose(name, overrides=words), composing.compose(name, words)
        assert nodes(ours) == nodes(theirs)
        ours.trainer.accelerator = "changed"


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ROOT / "configs", tmp_path / "configs"))
    assert composed("train", folder=folder)["seed"] != 77
    (folder / "local" / "default.yaml").write_text("# @package _global_\nseed: 77\n")
    assert composed("train", folder=folder)["seed"] == 77


def test_a_sweep_is_told_as_hydra_tells_it(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ROOT / "configs", tmp_path / "configs"))
    file = folder / "experiment" / "many.yaml"

    def modes() -> list[Any]:
        words = [[], ["model=mlp", "seed=1,2"], ["hydra.mode=MULTIRUN"], ["+experiment=many", "model.net.depth=1"]]
        words.append(["experiment=many", "seed=3"])
        with initialize_config_dir(str(folder), version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            return [hydra.get_mode(config_name="train", overrides=given) for given in words]

    for mode in ("MULTIRUN", "RUN"):
        file.write_text(f"# @package _global_\nhydra:\n  mode: {mode}\n")
        composing.anew()
        alone = modes()
        composing.once()
        assert modes() == modes() == alone
        assert [None if found is None else found.name for found in alone] == [None, None, "MULTIRUN", None, mode]
    file.write_text("# @package _global_\nhydra: {mode: MULTIRUN}\n")
    os.utime(file, ns=(1, 1))
    assert modes()[-1].name == "MULTIRUN"


def test_mistakes_are_found_each_time() -> None:
    for _ in range(2):
        with pytest.raises(MissingConfigException, match="nosuch"):
            composed("train", "model=nosuch")
        with pytest.raises(ConfigCompositionException, match="sedd"):
            composed("train", "sedd=1")
        for words in ("sedd=1", "seed.x=1"):
            with pytest.raises(ConfigCompositionException, match=words):
                config(words)


def test_what_a_launcher_left_behind_does_not_make_commands_start_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's agent leaves this one in its process; each command after it took seconds of imports."""
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM")
    for extra, kind in (({}, Command), ({"OMP_NUM_THREADS": "2"}, subprocess.Popen)):
        with start(command("--help"), tmp_path, environment(**extra)) as process:
            assert isinstance(process, kind)
            assert "train.py" in process.communicate(timeout=60)[0]


def test_all_workers_have_one_server() -> None:
    """A worker that starts one of its own imports everything once more."""
    server()
    mine = forkserver._forkserver._forkserver_pid is not None  # type: ignore[attr-defined]
    assert mine == ("PYTEST_XDIST_WORKER" not in os.environ)


def test_what_is_asked_once_is_what_would_be_answered_again() -> None:
    asked: Any = recorded._git
    for words in (("rev-parse", "HEAD"), ("diff", "HEAD")):
        assert asked(*words) == asked.__wrapped__(*words)
    told = recorded.describe_environment()["packages"]["torch"]  # CUDA builds name theirs in the module alone
    assert torch.__version__ in (told, f"{told}+{torch.__version__.partition('+')[2]}")
    group = "lightning.pytorch.callbacks_factory"
    assert list(registry.entry_points(group=group)) == list(metadata.entry_points(group=group))


def test_a_document_that_is_kept_is_what_would_be_read_again(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for text in ("seed: 1\nnet: {lr: 1e-3, on: [true, null, 2026-01-02]}\n", "seed: 2\n"):
        file.write_text(text)
        found = read_yaml(file, "it")
        assert found == read_yaml(file, "it") == quick._parsed_anew(text.encode(), "it")
        found["seed"] = "changed"  # of a copy
        assert read_yaml(file, "it")["seed"] == int(text[6])
    file.write_text("seed: *x\n")
    for where in ("run=a", "run=b"):
        with pytest.raises(UserError, match=f"^{where} "):
            read_yaml(file, where)


def test_the_longest_files_begin(pytestconfig: pytest.Config) -> None:
    conftest: Any = next(found for found in pytestconfig.pluginmanager.get_plugins() if hasattr(found, "LONGEST"))
    tests = ROOT / "tests"
    assert [name for name in conftest.LONGEST if not (tests / name).is_file()] == []
    items = [SimpleNamespace(path=tests / name) for name in ("test_wheel.py", "test_readme.py")]
    conftest.pytest_collection_modifyitems(items)
    assert [item.path.name for item in items] == ["test_readme.py", "test_wheel.py"]
