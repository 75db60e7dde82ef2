"""The user's own packages next to this one under `src/`, and the kinds of their classes."""

import importlib
import importlib.util
import inspect
from pathlib import Path

from lathe.configs import SOURCE

# The base class of each kind of component, as (module, name). Kinds without one are not checked.
BASES: dict[str, list[tuple[str, str]]] = {
    "task": [("lightning.pytorch", "LightningModule")],
    "module": [("torch.nn", "Module")],
    "optimizer": [("torch.optim", "Optimizer")],
    "scheduler": [("torch.optim.lr_scheduler", "LRScheduler")],
    "trainer": [("lightning.pytorch", "Trainer")],
    "strategy": [("lightning.pytorch.strategies", "Strategy")],
    "data": [("lightning.pytorch", "LightningDataModule"), ("torch.utils.data", "DataLoader")],
    "callback": [("lightning.pytorch", "Callback")],
    "logger": [("lightning.pytorch.loggers", "Logger")],
}


def is_user_code(name: str) -> bool:
    """True if a module under this project's `src/` could define `name`.

    Only files are looked at, and where Python would find the package: another one of that name may come first.
    """
    folder, (package, *rest) = SOURCE, name.split(".")
    if folder is None or package == "lathe" or not rest:
        return False
    path = folder.joinpath(package, *rest[:-1])
    file = next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)
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


def wrong_kind(name: str, kind: str, exact: bool) -> str | None:
    """Import `name` and return why it is not a component of `kind`; None if it is one or can't be imported.

    Without `exact`, which means that the user typed the whole name, its package must define it: imports of other
    packages in a module do not count.
    """
    module, _, attribute = name.rpartition(".")
    package = name.split(".")[0]
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module may raise anything, and does so again when it is built
        leads_on = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        return "it is not a class or function of a module" if leads_on and not exact else None
    if not exact and str(getattr(found, "__module__", None)).split(".")[0] != package:
        return f"{package} does not define it"
    if not inspect.isclass(found):
        return None if callable(found) else "it is neither a class nor a function"
    bases = tuple(getattr(importlib.import_module(place), base) for place, base in BASES.get(kind, []))
    return (
        None if not bases or issubclass(found, bases) else f"it is not a {' or '.join(base.__name__ for base in bases)}"
    )
