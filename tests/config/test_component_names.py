"""Names of components: every one that ships is public in its package."""

import importlib

import pytest
from hydra.utils import get_object
from support.runs import ROOT

from lathe.config.schema import component_keys, definitions


def is_public(name: str) -> bool:
    """True for lathe.<package>.<Name> that the package lists in `__all__`."""
    words = name.split(".")
    if len(words) != 3 or words[0] != "lathe":
        return False
    package = importlib.import_module(".".join(words[:2]))
    return hasattr(package, "__path__") and words[2] in package.__all__ and callable(get_object(name))


def test_the_schema_has_components_by_their_public_names() -> None:
    names = [name for name in definitions() if name.startswith("lathe.") and component_keys(name)]
    assert [name for name in names if not is_public(name)] == []


def test_all_public_names_can_be_imported() -> None:
    """Also the names that are imported lazily."""
    for file in sorted((ROOT / "src" / "lathe").glob("*/__init__.py")):
        package = importlib.import_module(f"lathe.{file.parent.name}")
        assert [name for name in getattr(package, "__all__", ()) if not hasattr(package, name)] == []
        with pytest.raises(AttributeError, match="Nothing"):
            _ = package.Nothing
