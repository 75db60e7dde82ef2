"""Packages of the user's own beside this one under `src/`, and the kinds of what they and trusted packages hold."""

import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

# The class that a part of a kind derives from, by the name of its module. Kinds that are not here have none: they are
# taken as they are.
BASES: dict[str, list[tuple[str, str]]] = {
    "task": [("lightning.pytorch", "LightningModule")],
    "module": [("torch.nn", "Module")],
    "optimizer": [("torch.optim", "Optimizer")],
    "scheduler": [("torch.optim.lr_scheduler", "LRScheduler")],
    "trainer": [("lightning.pytorch", "Trainer")],
    "strategy": [("lightning.pytorch.strategies", "Strategy")],
    "data": [("lightning.pytorch", "LightningDataModule"), ("torch.utils.data", "DataLoader")],
    "callback": [("lightning.pytorch", "Callback")],
    "method": [("lightning.pytorch", "Callback")],
    "logger": [("lightning.pytorch.loggers", "Logger")],
}


def source_folder() -> Path | None:
    """This project's `src/`, or None where Lathe is installed among other packages."""
    folder = Path(__file__).resolve().parents[2]
    return folder if folder.name == "src" and (folder.parent / "configs").is_dir() else None


def stands_in_src(name: str) -> bool:
    """Whether `name` is something that a module under this project's `src/` could define. Looks at files alone, and at
    where Python would look for the package: another of the same name may come first."""
    folder, (package, *rest) = source_folder(), name.split(".")
    if folder is None or package == "lathe" or not rest:
        return False
    file = _module_file(folder, [package, *rest[:-1]])
    if file is None or not file.resolve().is_relative_to(folder):
        return False
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = [spec.origin] if spec.origin and spec.has_location else list(spec.submodule_search_locations or [])
    return bool(places) and all(Path(place).resolve().is_relative_to(folder) for place in places)


def _module_file(folder: Path, parts: list[str]) -> Path | None:
    for part in parts[:-1]:
        folder = folder / part
    found = [folder / f"{parts[-1]}.py", folder / parts[-1] / "__init__.py"]
    return next((file for file in found if file.is_file()), None)


def wrong_kind(name: str, kind: str, exact: bool) -> str | None:
    """Imports `name` and says what is wrong with it as a part of `kind`; None if nothing is, or it can't be imported,
    which building it will say. `exact` is whether the user has named it in full; else it must be defined in the package
    that was named, and not be something that the package itself has imported."""
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception:  # the user's own module can fail in any way
        return None if exact else _through(name)
    if not exact and str(getattr(found, "__module__", None)).split(".")[0] != name.split(".")[0]:
        return f"{name.split('.')[0]} does not define it"
    if not inspect.isclass(found):
        return None if callable(found) else "it is neither a class nor a function"
    bases = tuple(getattr(importlib.import_module(place), base) for place, base in BASES.get(kind, []))
    return None if not bases or issubclass(found, bases) else f"it is no {' or '.join(base.__name__ for base in bases)}"


def _through(name: str) -> str | None:
    """A name that leads through something else than modules, such as a method of a class, is looked up by Hydra, but
    not for a stranger.
    """
    parts = name.split(".")
    for end in range(len(parts) - 2, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except Exception:  # noqa: S112 - as above; a shorter name may be a module
            continue
        return "it is no class or function of a module" if hasattr(found, parts[end]) else None
    return None
