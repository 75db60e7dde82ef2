"""The choices in configs/: those that ship, and a user's."""

import json
import re

from support.runs import ROOT

CONFIGS = ROOT / "configs"
SHIPPED = set(json.loads((CONFIGS / "schema.json").read_text())["files"])  # or are listed later by scripts/schema.py
ALL = {
    f"{path.parent.name}={path.stem}": path.read_text()
    for path in sorted(CONFIGS.glob("*/*.yaml"))
    if path.parent.name != "local"
}


def packages() -> list[str]:
    """Return the user's packages and modules under src/."""
    found = {path.name.removesuffix(".py") for path in (ROOT / "src").iterdir() if path.suffix in ("", ".py")}
    return sorted(found - {"lathe", "hydra_plugins", "__pycache__"})


def named_by(text: str) -> set[str]:
    """Return the choices in the defaults of a file."""
    found = re.findall(r"^ *- (?:override )?/?(\w+)(?:@\S+)?: *\[?([\w., -]+)", text, flags=re.MULTILINE)
    return {f"{group}={name}" for group, names in found for name in re.split("[, ]+", names)}


def _yours() -> list[str]:
    """Return the choices that schema.json lacks, that build a user's class, or that name such a choice."""
    part = re.compile(rf"(?:_target_|path)[\"']?: *[\"']?(?:{'|'.join(map(re.escape, packages())) or '(?!)'})\.")
    found = {
        choice for choice, text in ALL.items() if f"{choice.replace('=', '/')}.yaml" not in SHIPPED or part.search(text)
    }
    while more := {choice for choice, text in ALL.items() if named_by(text) & found} - found:
        found |= more
    return sorted(found)


YOURS = _yours()
OURS = [choice for choice in ALL if choice not in YOURS]
# True in a clone with a user's components.
SHARED = bool(packages() or YOURS)


def names(group: str) -> list[str]:
    """Return the choices of a group that ship."""
    return [choice.partition("=")[2] for choice in OURS if choice.startswith(f"{group}=")]
