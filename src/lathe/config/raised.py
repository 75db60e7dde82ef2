"""What Hydra and OmegaConf have raised, and of what."""

import re
import sys
import traceback
from pathlib import Path

from lathe.config.flags import Groups


def unchosen(text: str, groups: Groups) -> str | None:
    """The sentence for a group whose choice is missing, or follows what no group is."""
    missing = re.match(r"You must specify '([^']+)'", text)
    if missing:
        return f"{missing[1]}=???: expected a choice; choose one of {', '.join(groups.get(missing[1], ()))}"
    if text.endswith("interpolation is not supported in options list items"):
        typed = next((word for word in sys.argv[1:] if re.search(r"=\[.*\$\{", word)), "a list of choices")
        return f"{typed}: such a list holds names of choices alone, none that follows another group."
    follows = re.match(r"Error resolving interpolation '([^']+)'", text)
    if follows:
        word = next((word for word in sys.argv[1:] if word.partition("=")[2] == follows[1]), follows[1])
        return f"{word}: a choice can follow another group alone, as ${{model}} does, and that is none: name a choice."
    return None


def override_of(error: BaseException) -> tuple[str, str]:
    """The group and the choice of the override that Hydra was to read when it raised; both empty where none was."""
    overrides = [frame.f_locals.get("override") for frame, _ in traceback.walk_tb(error.__traceback__)]
    line = next((str(found.input_line) for found in reversed(overrides) if hasattr(found, "input_line")), "")
    group, _, choice = line.partition("=")
    return group.lstrip("+~"), choice


def of_hydras_lists(error: BaseException) -> bool:
    """Whether Hydra's code has raised it, reading which files a file names: none of its own exceptions."""
    if not isinstance(error, (TypeError, ValueError, AttributeError, KeyError, AssertionError, RecursionError)):
        return False
    frames = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    lists = ("hydra._internal.defaults_list", "hydra.core.default_element", "hydra._internal.config_repository")
    return any(name in lists for name in (frames if isinstance(error, RecursionError) else frames[-1:]))


def loaded_file(error: BaseException) -> str:
    """The name of the file that OmegaConf was to load."""
    files = [frame.f_locals.get("file_") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((str(getattr(file, "name", file)) for file in files if file is not None), "a configuration file")


def of_omegaconf(error: BaseException) -> bool:
    """Whether OmegaConf's own code has raised it, reading a key: the same words can come from any number in a file."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("omegaconf.")


def undecodable(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return True
    return False
