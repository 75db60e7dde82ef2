"""What `--help` prints: the map of the configuration as it is written, and the choices of every group.

Hydra's own help composes the configuration once for each of its groups, which takes several times as long as the whole
start of a run. Nothing is parsed here: the YAML files are meant to be read.
"""

import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from textwrap import fill

from lathe.configs import FOLDER


def configuration_folder() -> Path | None:
    """The folder `configs` beside the script that is running, or beside its folder; else the one that travels with the
    package, for a script of the same name as in a clone."""
    script = Path(sys.argv[0]).resolve()
    beside = next(
        (folder / "configs" for folder in (script.parent, script.parent.parent) if (folder / "configs").is_dir()), None
    )
    return beside or (FOLDER if (FOLDER / f"{script.stem}.yaml").is_file() else None)


@cache
def default_choices() -> dict[str, str]:
    """What train.yaml chooses for each group that it gives one."""
    import yaml  # here: few ask

    listed = yaml.safe_load((FOLDER / "train.yaml").read_text(encoding="utf-8"))["defaults"]
    return {name: str(choice) for item in listed if isinstance(item, dict) for name, choice in item.items()}


def choices(folder: Path) -> dict[str, list[str]]:
    """The names of the choices of every group."""
    groups = sorted(path for path in folder.iterdir() if path.is_dir())
    return {group.name: sorted(path.stem for path in group.glob("*.yaml")) for group in groups}


def root_names() -> dict[str, list[str]]:
    """What an override may start with: the groups and their choices, and the keys at the root of the script's
    configuration.
    """
    folder = configuration_folder()
    return {} if folder is None else names_of(folder, Path(sys.argv[0]).stem)


def names_of(folder: Path, verb: str) -> dict[str, list[str]]:
    """As `root_names`, of the configuration `verb` in `folder`."""
    keys: list[str] = re.findall(r"^(\w+):", _map(folder, verb), flags=re.MULTILINE)
    return {**{key: [] for key in keys}, **choices(folder)}


def _map(folder: Path, verb: str) -> str:
    path = folder / f"{verb}.yaml"
    return path.read_text() if path.is_file() else ""


def help_text(typed: Sequence[str] = ()) -> str:
    """The script's first words, its configuration file and the choices of the groups that the file names; or, where
    keys were `typed` (and overrides, which choose the composition), what there is to say of these keys.

    Raises:
        UserError: there is no such key.
    """
    folder, asked = configuration_folder(), [word for word in typed if "=" not in word and not word.startswith("-")]
    if folder is not None and asked:
        from lathe.config.schema.explained import (
            explained,
        )  # here: it composes, which the help without keys need not wait for

        return explained(folder, Path(sys.argv[0]).stem, asked, [word for word in typed if "=" in word])
    words = (sys.modules["__main__"].__doc__ or "").strip()
    if folder is None:
        return words
    text = _map(folder, Path(sys.argv[0]).stem)
    named = re.findall(r"^  - (?:optional )?(?!hydra:)(\w+):", text, flags=re.MULTILINE)
    training = "optimizer" in named or "\n  - train " in text
    table = {group: names for group, names in choices(folder).items() if group in named and names}
    rows = "".join(f"  {group:14}{', '.join(names)}\n" for group, names in table.items())
    keys = [key for key in re.findall(r"^(\w+):", text, flags=re.MULTILINE) if key != "defaults"]
    key, group = ("optimizer.lr", "optimizer") if training else (keys[0], "".join(named[:1]))
    flags = [
        f"--help {key} explains a key{f', --help {group} the group' if group else ''}",
        "-m runs a sweep (-m seed=1,2,3)" * ("sweep" in named),
        "--cfg job prints the composed configuration without running",
        "--trust asks before parts that a run directory names are built" * (training or "trust" in named),
        "--hydra-help lists Hydra's own.",
    ]
    parts = [words, f"Choices of each group:\n{rows}" if rows else "", text.strip()]
    return "\n\n".join([*filter(None, parts), fill(f"Flags: {'; '.join(filter(None, flags))}", 120)])
