"""The tests' own helpers: cached compositions equal Hydra's."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from support import composing
from support.runs import ROOT


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
    """Return all that omegaconf stores of a configuration, with values and flags; check parents."""
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
        ("train", ["model=mlp", "name='a b'", 'tags=["a,b",c]', "seed=null", "+trainer.x=[1,2]", "~model.net.depth"]),
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
        found["trainer"]["max_epochs"] = "changed"  # a copy
    for _ in range(2):
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            theirs, ours = compose(name, overrides=words), composing.compose(name, words)
        assert nodes(ours) == nodes(theirs)
        ours.trainer.accelerator = "changed"
