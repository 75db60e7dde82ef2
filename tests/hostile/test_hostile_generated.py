"""Names of all installed packages: only those on the allow-list pass, and none is imported for the check."""

import ast
import importlib
import random
import sys
import sysconfig
from pathlib import Path

from support.hostile_runs import HERE, NOWHERE, put

from lathe.trust.allowlist import BASES, NET_PARTS, PLACES, findings, kinds_of

KEYS = (*HERE, *NOWHERE, "model", "model.init", "data", "data.augment", "callbacks.x.y", "request.run")


def modules(draw: random.Random, packages: int) -> list[tuple[str, Path]]:
    """The Python files of some packages of the standard library and of those that are installed, by the module's
    name.
    """
    folders = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    tops = sorted(
        path for folder in folders for path in folder.iterdir() if path.name not in ("site-packages", "dist-packages")
    )
    tops = draw.sample(tops, min(packages, len(tops)))
    found = []
    for top in tops:
        for path in [top] if top.suffix == ".py" else sorted(top.rglob("*.py")):
            parts = path.relative_to(top.parent).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            if parts and all(part.isidentifier() for part in parts) and parts[0] != "lathe":
                found.append((".".join(parts), path))
    return found


def names_in(module: str, path: Path) -> list[str]:
    """The names that a file defines or imports at its top."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []
    names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    names += [
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    ]
    return [f"{module}.{name}" for name in names if name != "*"]


def try_out(seed: int, files: int, packages: int) -> int:
    """Draws names from `files` files and asks for each at three keys; returns how many were tried."""
    draw, tried = random.Random(seed), 0
    everything = modules(draw, packages)
    for module, path in draw.sample(everything, min(files, len(everything))):
        for name in draw.sample(found := names_in(module, path), min(6, len(found))):
            for key in draw.sample(KEYS, 3):
                value = name if key == "model.init" else {"_target_": name}
                kinds = kinds_of(name)
                passes = not list(findings(put({}, key, value), [], {}))
                if passes:  # on the list, and of the kind that belongs there
                    kind = next(kind for pattern, kind in PLACES if pattern.fullmatch(key))
                    if kind == "net part":
                        kind = next((one for one in NET_PARTS if one in kinds), kind)
                    assert kind in kinds, f"seed {seed}: {name} at {key}"
                    top, _, attribute = name.rpartition(".")
                    bases = tuple(getattr(importlib.import_module(place), base) for place, base in BASES[kind])
                    assert issubclass(getattr(importlib.import_module(top), attribute), bases), (
                        f"seed {seed}: {name} at {key}"
                    )
                tried += 1
    return tried


def test_a_sample_of_all_installed_names_is_refused() -> None:
    seed = random.randrange(2**32)
    before = set(sys.modules)
    try_out(seed, 100, 40)
    known = ("torch", "lightning", "torchmetrics", "encodings")  # the last by reading files in their own encoding
    loaded = {name for name in set(sys.modules) - before if not name.startswith(known)}
    assert loaded == set(), f"seed {seed}"
