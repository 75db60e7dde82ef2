"""Names of all imported modules: only those on the allow-list pass, and none is imported for the check."""

import importlib
import random
import sys
from types import ModuleType

from support.hostile_runs import HERE, NOWHERE, put

from lathe.trust.allowlist import KINDS, NET_PARTS, PLACES, findings, kinds_of

KEYS = (*HERE, *NOWHERE, "model", "model.init", "data", "data.augment", "callbacks.x.y", "request.run")


def test_a_sample_of_all_imported_names_is_refused() -> None:
    """torch, Lightning, NumPy and the standard library among them, with what each module imports itself."""
    seed = random.randrange(2**32)
    draw, before = random.Random(seed), set(sys.modules)
    found = {name: module for name, module in sys.modules.items() if isinstance(module, ModuleType)}
    modules = {name: list(vars(module)) for name, module in found.items() if not name.startswith("lathe")}
    for module in draw.sample(sorted(modules), 300):
        for name in draw.sample(modules[module], min(6, len(modules[module]))):
            for key in draw.sample(KEYS, 3):
                where = f"seed {seed}: {module}.{name} at {key}"
                value = f"{module}.{name}" if key == "model.init" else {"_target_": f"{module}.{name}"}
                if list(findings(put({}, key, value), [], {})):
                    continue
                kinds = kinds_of(f"{module}.{name}")  # it is on the list, and of the kind that belongs there
                kind = next(kind for pattern, kind in PLACES if pattern.fullmatch(key))
                if kind == "net part":
                    kind = next((one for one in NET_PARTS if one in kinds), kind)
                assert kind in kinds, where
                bases = tuple(getattr(importlib.import_module(place), base) for place, base in KINDS[kind][1])
                assert issubclass(getattr(sys.modules[module], name), bases), where
    known = ("torch", "lightning", "torchmetrics")  # of the bases
    assert {name for name in set(sys.modules) - before if not name.startswith(known)} == set(), f"seed {seed}"
