"""Messages for what Hydra, OmegaConf and the YAML reader refuse.

Our own message where the library's does not say what to type; otherwise the library's message on one line.
"""

import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from lathe.config.help import configuration_folder
from lathe.config.override_parsing import (
    LISTS,
    Groups,
    InvalidOverrides,
    as_typed,
    check_flags,
    find_split_words,
    key_of,
    no_such_choice,
)
from lathe.config.resolve import flatten, resolve
from lathe.config.validate import check
from lathe.errors import UserError, did_you_mean


def hydra_message(error: BaseException, groups: Groups) -> str | None:
    """The message for an error of Hydra, OmegaConf or YAML, which may be a UserError already; None for any other.

    `groups` are the names that an override may start with: the groups with their choices, and the root keys with none.
    """
    from yaml import YAMLError  # not needed for --help

    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, YAMLError):
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f"{mark.name}, line {mark.line + 1}" if mark else getattr(error, "name", "a configuration file")
        return f"{where}: invalid YAML ({problem or str(error).splitlines()[0]})."
    if isinstance(error, UnicodeDecodeError):
        path = _file_that_is_not_utf8()
        return f"{path}: the file is not UTF-8 text. Save it as UTF-8." if path else None
    if isinstance(error, MissingConfigException):
        return _missing_file(error, groups)
    if isinstance(error, OverrideParseException):
        return _invalid_override(str(error.override))
    refused = error.__cause__ if isinstance(error, ConfigCompositionException) and error.__cause__ else error
    if refused is not error and isinstance(refused, ConfigAttributeError | ConfigKeyError):
        return _unknown_key(str(refused.full_key or ""), refused.parent_node, groups)
    if isinstance(refused, OmegaConfBaseException):
        return f"{refused.full_key or 'configuration'}: {str(refused).splitlines()[0]}"
    text = " ".join(str(error).split())
    if isinstance(error, HydraException):
        return text
    return f"Hydra can't read the configuration: {type(error).__name__}: {text}" if _raised_by_hydra(error) else None


def _raised_by_hydra(error: BaseException) -> bool:
    """True if the innermost frame is Hydra's or OmegaConf's: an override or a file it can't handle, such as model=true.

    A defaults list that includes itself ends in a RecursionError, somewhere in Python's own modules.
    """
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, RecursionError):
        return "hydra._internal.defaults_list" in modules
    return bool(modules) and modules[-1].startswith(("hydra.", "omegaconf."))


def _file_that_is_not_utf8() -> Path | None:
    for folder in (configuration_folder(), check_flags(sys.argv[1:]).config_dir):
        for path in Path(folder).rglob("*.yaml") if folder else ():
            try:
                path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                return path
    return None


def _missing_file(error: MissingConfigException, groups: Groups) -> str:
    file = str(error.missing_cfg_file or "")
    group = max((name for name in groups if file.startswith(f"{name}/")), key=len, default=file.rpartition("/")[0])
    options = error.options or groups.get(group)
    if group and options:
        return no_such_choice(group, file.removeprefix(f"{group}/"), options, groups)
    return str(error).splitlines()[0]


def _invalid_override(override: str) -> str:
    key, _, value = override.partition("=")
    if not value or value[0] in "[{('\"":
        return f"{override}: invalid override. Write key=value, and close every bracket and quote."
    quoted = f"{key}={as_typed(value)}"
    quoted = shlex.quote(quoted) if re.search(r'["$`!\\]', quoted) else f'"{quoted}"'
    return f"{override}: invalid override. Values with special characters need quotes: {quoted}"


def _unknown_key(key: str, parent: Any, groups: Groups) -> str:
    prefix, _, last = key.rpartition(".")
    names = [str(name) for name in parent] if isinstance(parent, DictConfig) else []
    if prefix in groups and last in groups[prefix]:
        if any(typed.startswith("resume=") for typed in sys.argv[1:]):
            return f"{key}: a resumed run keeps its own {prefix}. Leave {last} out."
        chosen = ",".join([*LISTS.get(prefix, []), last])
        return f"{key}: the run has no {last} in {prefix}. Add it: {prefix}=[{chosen}]."
    if prefix in groups and names in ([], ["enabled"]):  # compile=none has a switch
        others = [f"{prefix}={name}" for name in groups[prefix] if name != "none"]
        of_module = prefix in ("optimizer", "scheduler")
        hint = f" A LightningModule has its own, an argument: +model.net.{last}=..." if of_module else ""
        return f"{key}: {prefix}=none has no keys. Choose another: {', '.join(others)}.{hint}"
    leaves = [f"{prefix}.{leaf}" if prefix else leaf for leaf in _keys_ending_in(last, parent)]
    hint = f"did you mean {' or '.join(leaves)}?" if leaves else did_you_mean(last, names)
    if last in groups and last != prefix and prefix and not hint.startswith("did you mean"):
        hint = f"did you mean {last}?"
    where = f" in {prefix}" if prefix else ""
    return f"{key}: unknown key{where}{'; ' if hint else ''}{hint} (put a + in front to add a new key)"


def _keys_ending_in(name: str, tree: Any) -> list[str]:
    """At most three full keys below `tree` that end in `name`, the shortest first, without Hydra's own."""
    leaves = flatten(OmegaConf.to_container(tree)) if isinstance(tree, DictConfig) else {}
    found = (key for key in leaves if key.endswith(f".{name}") and not key.startswith("hydra."))
    return sorted(found, key=lambda key: (key.count("."), key))[:3]


def explain_overrides(
    error: Exception, folder: Path | None, verb: str, words: Sequence[str], groups: Groups
) -> UserError | None:
    """The messages for all overrides in `words` that are refused, where Hydra stops at the first with `error`.

    Composes the configuration in `folder` again without each refused override. None if `error` is something else.
    """
    first = hydra_message(error, groups)
    if isinstance(error, InvalidOverrides):
        messages, left = list(error.args), list(error.valid)
    elif isinstance(error, UserError) or first is None:
        return None
    else:
        messages, left = [], find_split_words(words)[1]
    if folder is None or any(word.startswith("-") for word in words):  # a sweep, or other configuration files
        return UserError(*(messages or [str(first)]))
    while not isinstance(cfg := _composed(folder, verb, left), DictConfig):
        valid, refused = 0, len(left)  # so many words compose, and so many do not with the error `cfg`
        while refused - valid > 1:
            middle = (valid + refused) // 2
            found = _composed(folder, verb, left[:middle])
            if isinstance(found, DictConfig):
                valid = middle
            else:
                refused, cfg = middle, found
        messages.append(hydra_message(cfg, groups) or str(cfg))
        if not left:
            return UserError(*dict.fromkeys(messages))
        key = key_of(left.pop(refused - 1))
        left = [word for word in left if not key_of(word).startswith(f"{key}.")]  # keys of a choice that is not there
    return UserError(*(dict.fromkeys(messages or [str(first)])), *_invalid_values(cfg, verb, left))


def _composed(folder: Path, verb: str, words: Sequence[str]) -> DictConfig | Exception:
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            return compose(verb, overrides=list(words))
    except Exception as error:
        return error


def _invalid_values(cfg: DictConfig, verb: str, words: Sequence[str]) -> list[str]:
    """The messages for values of the overrides `words`."""
    try:
        messages = check(resolve(cfg), verb, rules=None, raw=OmegaConf.to_container(cfg, resolve=False))
    except UserError:  # the refused overrides may be what is missing
        return []
    typed = [key_of(word) for word in words]
    return [message for message in messages if re.split("[=:]", message)[0] in typed]
