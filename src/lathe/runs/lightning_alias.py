"""Import `lightning.pytorch` where a package asks for `pytorch_lightning`, its other name."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

OLD, NEW = "pytorch_lightning", "lightning.pytorch"


class _Alias(MetaPathFinder, Loader):
    """Finds each module of `pytorch_lightning` as the one of the same name in `lightning.pytorch`."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != OLD:
            return None
        if name == OLD:
            rank_zero_only(print)(f"{OLD} is imported as {NEW}: the classes of both would not fit.", flush=True)
        return spec_from_loader(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(NEW + spec.name.removeprefix(OLD))
        self._specs[module.__name__] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._specs[module.__name__]  # which the import has replaced


def alias_pytorch_lightning() -> None:
    """Let later imports of `pytorch_lightning` give `lightning.pytorch`, unless it has been imported already."""
    if OLD not in sys.modules and not any(isinstance(finder, _Alias) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Alias())
