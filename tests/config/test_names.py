"""Names of parts: every one that ships stands on the face of its room, and those of earlier versions lead there."""

import importlib
from typing import Any

import pytest
import yaml
from hydra.utils import get_object
from support.runs import ROOT

from lathe.config.schema.check import component_keys, definitions
from lathe.config.schema.names import RENAMED, canonical, renamed

OLD = yaml.safe_load((ROOT / "tests" / "hostile" / "names_of_old_runs.yaml").read_text())


def on_a_face(name: str) -> bool:
    """Whether a name is lathe.<room>.<Name>, of a package, and public there."""
    words = name.split(".")
    if len(words) != 3 or words[0] != "lathe":
        return False
    room = importlib.import_module(".".join(words[:2]))
    return hasattr(room, "__path__") and words[2] in room.__all__ and callable(get_object(name))


def test_the_tables_know_parts_by_their_faces() -> None:
    names = [name for name in definitions() if name.startswith("lathe.") and component_keys(name)]
    assert [name for name in names if not on_a_face(name)] == []
    assert set(RENAMED.values()) <= set(names)


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_older_name_leads_to_a_face(old: str, new: str) -> None:
    assert on_a_face(new)
    assert new not in RENAMED  # one step
    assert not on_a_face(old)


def test_every_name_in_earlier_runs_leads_to_a_face() -> None:
    names = [name for group in OLD.values() for name in group if name.startswith("lathe.")]
    assert [name for name in names if not on_a_face(RENAMED.get(name, name))] == []


def test_all_that_a_face_promises_is_there() -> None:
    """Also what is imported only when it is asked for."""
    for file in sorted((ROOT / "src" / "lathe").glob("*/__init__.py")):
        room = importlib.import_module(f"lathe.{file.parent.name}")
        assert [name for name in getattr(room, "__all__", ()) if not hasattr(room, name)] == []
        with pytest.raises(AttributeError, match="Nothing"):
            _ = room.Nothing


def test_names_are_changed_where_parts_are_named_and_nowhere_else() -> None:
    old, new = "lathe.callbacks.ema.EMA", "lathe.callbacks.EMA"
    muon = {"_target_": "hydra.utils.get_class", "path": "lathe.optim.muon.Muon"}
    tree: dict[str, Any] = {
        "callbacks": {"a": {"_target_": old, "decay": 0.9}, "b": None},
        "optimizer": {"kind": muon},
        "data": {"_target_": "mine.Data", "path": old, "note": old},
        "list": [{"_target_": old}, old, {"_target_": ["odd"]}, {3: old}],
        "tags": [old],
    }
    told: list[tuple[str, str, str]] = []
    after = renamed(tree, lambda *words: told.append(words))
    assert after["callbacks"] == {"a": {"_target_": new, "decay": 0.9}, "b": None}
    assert after["optimizer"]["kind"]["path"] == "lathe.optim.Muon"
    assert after["list"] == [{"_target_": new}, old, {"_target_": ["odd"]}, {3: old}]
    assert (after["data"], after["tags"]) == (tree["data"], tree["tags"])
    assert told == [
        ("callbacks.a._target_", old, new),
        ("optimizer.kind.path", "lathe.optim.muon.Muon", "lathe.optim.Muon"),
        ("list[0]._target_", old, new),
    ]
    assert tree["callbacks"]["a"]["_target_"] == old  # a copy


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("lathe.callbacks.ema.EMA", "lathe.callbacks.EMA"),
        ("lathe.callbacks.EMA", "lathe.callbacks.EMA"),
        ("lightning.pytorch.callbacks.early_stopping.EarlyStopping", "lightning.EarlyStopping"),
        ("pytorch_lightning.Trainer", "lightning.Trainer"),
        ("torch.optim.sgd.SGD", "torch.optim.SGD"),
        ("mine.parts.EMA", "mine.parts.EMA"),
        ("EMA", "EMA"),
    ],
)
def test_a_class_has_one_name_wherever_it_is_found(target: str, name: str) -> None:
    assert canonical(target) == name
