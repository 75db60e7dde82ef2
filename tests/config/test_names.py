"""Names of components: every one that ships is public in its package."""

import importlib

import pytest
from hydra.utils import get_object
from support.runs import ROOT

from lathe.config.schema.check import component_keys, definitions
from lathe.config.schema.names import canonical


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


def test_all_that_a_face_promises_is_there() -> None:
    """Also what is imported only when it is asked for."""
    for file in sorted((ROOT / "src" / "lathe").glob("*/__init__.py")):
        room = importlib.import_module(f"lathe.{file.parent.name}")
        assert [name for name in getattr(room, "__all__", ()) if not hasattr(room, name)] == []
        with pytest.raises(AttributeError, match="Nothing"):
            _ = room.Nothing


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
