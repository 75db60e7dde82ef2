"""Print --help: the YAML file of the command as it is, and the choices of its groups.

Hydra's own help composes the configuration once for each group, which takes longer than the start of a run.
"""

import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from textwrap import fill

from lathe.configs import FOLDER


def configuration_folder() -> Path | None:
    """Return the folder with the running script's file: `configs` next to it or its folder, or the package's."""
    script = Path(sys.argv[0]).resolve()
    folders = (script.parent / "configs", script.parent.parent / "configs", FOLDER)
    return next((folder for folder in folders if (folder / f"{script.stem}.yaml").is_file()), None)


@cache
def default_choices() -> dict[str, str]:
    """Return the choice of train.yaml for each of its groups."""
    import yaml  # not needed for --help

    defaults = yaml.safe_load((FOLDER / "train.yaml").read_text(encoding="utf-8"))["defaults"]
    return {name: str(choice) for item in defaults if isinstance(item, dict) for name, choice in item.items()}


def choices(folder: Path) -> dict[str, list[str]]:
    """Return the names of the choices of every group."""
    groups = sorted(path for path in folder.iterdir() if path.is_dir())
    return {group.name: sorted(path.stem for path in group.glob("*.yaml")) for group in groups}


def root_names() -> dict[str, list[str]]:
    """Return the names that an override may begin with: groups with their choices, and root keys with none."""
    folder = configuration_folder()
    return {} if folder is None else names_of(folder, Path(sys.argv[0]).stem)


def names_of(folder: Path, verb: str) -> dict[str, list[str]]:
    """Return the same as `root_names` for the configuration `verb` in `folder`."""
    path = folder / f"{verb}.yaml"
    keys: list[str] = re.findall(r"^(\w+):", path.read_text() if path.is_file() else "", flags=re.MULTILINE)
    return {**{key: [] for key in keys}, **choices(folder)}


def help_text(typed: Sequence[str] = ()) -> str:
    """Return the help of the running script, or of the keys in `typed`, whose overrides choose the composition."""
    folder, verb = configuration_folder(), Path(sys.argv[0]).stem
    keys = [word for word in typed if "=" not in word and not word.startswith("-")]
    if folder is not None and keys:
        from lathe.config.help_key import KeyHelp  # it composes, which takes longer

        page = KeyHelp(folder, verb, [word for word in typed if "=" in word])
        return "\n\n".join(map(page.explain, keys))
    title = (sys.modules["__main__"].__doc__ or "").strip()
    if folder is None:
        return title
    text = (folder / f"{verb}.yaml").read_text()
    groups = re.findall(r"^  - (?:optional )?(?!hydra:)(\w+):", text, flags=re.MULTILINE)
    rows = "".join(f"  {group:14}{', '.join(names)}\n" for group, names in choices(folder).items() if group in groups)
    is_training = "optimizer" in groups or "\n  - train " in text
    first_key = next(key for key in re.findall(r"^(\w+):", text, flags=re.MULTILINE) if key != "defaults")
    key, group = ("optimizer.lr", "optimizer") if is_training else (first_key, "".join(groups[:1]))
    flags = [
        f"--help {key} explains a key{f', --help {group} the group' if group else ''}",
        "-m runs a sweep (-m seed=1,2,3)" * ("sweep" in groups),
        "--cfg job prints the composed configuration without running",
        "--hydra-help lists Hydra's own.",
    ]
    sections = [title, f"Choices of each group:\n{rows}" if rows else "", text.strip()]
    return "\n\n".join([*filter(None, sections), fill(f"Flags: {'; '.join(filter(None, flags))}", 120)])
