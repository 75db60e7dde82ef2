"""Compose a list of overrides in this process, as a command does, and explain what Hydra refuses. Imports no torch.

An error of Hydra, OmegaConf and the YAML reader gets our own message where the library's does not say what to type;
otherwise it is the library's message on one line.
"""

import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir, version
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from lathe.config.help import configuration_folder, names_of
from lathe.config.override_parsing import (
    LISTS,
    Groups,
    InvalidOverrides,
    as_typed,
    check_flags,
    find_split_words,
    key_of,
    no_such_choice,
    translate,
)
from lathe.config.resolve import flatten, resolve
from lathe.config.validate import check
from lathe.configs import FOLDER
from lathe.errors import UserError, did_you_mean, require

OVERRIDES = "lathe_overrides"  # a flag of a composed configuration and its copies: the overrides that it was made of


@contextmanager
def composing(verb: str, overrides: Sequence[str]) -> Iterator[DictConfig]:
    """Compose `overrides` for `verb`, such as train, and set Hydra's globals as in a command until this is closed.

    Raises UserError with a message for each override that Hydra refuses.
    """
    names = names_of(FOLDER, verb)
    arguments = [str(word) for word in overrides]
    flag = next((word for word in arguments if word.startswith("-")), None)
    require(flag is None, f"{flag}: only overrides are taken here, such as model=mlp; write a sweep as a loop.")
    # a notebook may have initialised Hydra's globals
    hydra, config, base = GlobalHydra.instance().hydra, HydraConfig.instance().cfg, version.getbase()
    GlobalHydra.instance().clear()
    try:
        try:
            initialize_config_dir(str(FOLDER), version_base="1.3", job_name=verb)
            arguments = translate(arguments, names)
            cfg = compose(verb, overrides=arguments, return_hydra_config=True)
        except Exception as error:
            GlobalHydra.instance().clear()
            explained = explain_overrides(error, FOLDER, verb, arguments, names)
            if explained is None:
                raise
            raise explained from error
        with open_dict(cfg):
            cfg.hydra.mode, cfg.hydra.job.config_name = RunMode.RUN, verb
            HydraConfig.instance().set_config(cfg)
            del cfg["hydra"]
        untyped: Any = cfg  # flags are typed as booleans
        untyped._set_flag([OVERRIDES], [arguments])
        yield cfg
    finally:
        GlobalHydra.instance().hydra, HydraConfig.instance().cfg = hydra, config
        version.VersionBase.instance().version_base = base  # setbase refuses None


def overrides_of(cfg: DictConfig, verb: str = "train") -> list[str]:
    """Return the overrides that compose `cfg`: those given to `lathe.compose`, and one for each key changed since."""
    flags: dict[str, Any] = cfg._metadata.flags or {}
    original = [str(word) for word in flags.get(OVERRIDES) or []]
    with composing(verb, original) as composed:
        before, after = (flatten(OmegaConf.to_container(tree)) for tree in (composed, cfg))
    missing = object()
    changed = [
        f"{'' if key in before else '++'}{key}={as_typed(value)}"
        for key, value in after.items()
        if before.get(key, missing) != value
    ]
    removed: dict[str, None] = {}
    for key in (key for key in before if not _is_related(key, after)):
        parts = key.split(".")
        parents = (".".join(parts[: end + 1]) for end in range(len(parts)))
        removed[f"~{next(name for name in parents if not _is_related(name, after))}"] = None
    return [*original, *removed, *changed]


def _is_related(key: str, keys: Iterable[str]) -> bool:
    """True if one of `keys` is `key`, or a parent or child of it."""
    return any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in keys)


# Messages for what is refused


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
        for folder in filter(None, (configuration_folder(), check_flags(sys.argv[1:]).config_dir)):
            for path in Path(folder).rglob("*.yaml"):
                try:
                    path.read_text(encoding="utf-8")
                except UnicodeDecodeError:
                    return f"{path}: the file is not UTF-8 text. Save it as UTF-8."
        return None
    if isinstance(error, MissingConfigException):
        file = str(error.missing_cfg_file or "")
        group = max((name for name in groups if file.startswith(f"{name}/")), key=len, default=file.rpartition("/")[0])
        options = error.options or groups.get(group)
        if group and options:
            return no_such_choice(group, file.removeprefix(f"{group}/"), options, groups)
        return str(error).splitlines()[0]
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
    # anything else that Hydra raises is an override or a file it can't handle, such as model=true; a defaults list that
    # includes itself ends in a RecursionError, somewhere in Python's own modules
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_endless = isinstance(error, RecursionError) and "hydra._internal.defaults_list" in modules
    if is_endless or "".join(modules[-1:]).startswith(("hydra.", "omegaconf.")):
        return f"Hydra can't read the configuration: {type(error).__name__}: {text}"
    return None


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
    tree = flatten(OmegaConf.to_container(parent)) if isinstance(parent, DictConfig) else {}
    ends = [leaf for leaf in tree if leaf.endswith(f".{last}") and not leaf.startswith("hydra.")]
    ends = sorted(ends, key=lambda leaf: (leaf.count("."), leaf))[:3]
    leaves = " or ".join(f"{prefix}.{leaf}" if prefix else leaf for leaf in ends)
    hint = f"did you mean {leaves}?" if leaves else did_you_mean(last, names)
    if last in groups and last != prefix and prefix and not hint.startswith("did you mean"):
        hint = f"did you mean {last}?"
    where = f" in {prefix}" if prefix else ""
    return f"{key}: unknown key{where}{'; ' if hint else ''}{hint} (put a + in front to add a new key)"


def explain_overrides(
    error: Exception, folder: Path | None, verb: str, arguments: Sequence[str], groups: Groups
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
        messages, left = [], find_split_words(arguments)[1]
    if folder is None or any(word.startswith("-") for word in arguments):  # a sweep, or other configuration files
        return UserError(*(messages or [str(first)]))
    # composing takes a fifth of a second: not again for the words that Hydra has just refused, nor for none
    is_refused = isinstance(error, (ConfigCompositionException, OverrideParseException)) and left == list(arguments)
    cfg = error if is_refused else _composed(folder, verb, left)
    while not isinstance(cfg, DictConfig):
        valid, refused = 0, len(left)  # so many words compose, and so many do not with the error `cfg`
        while refused - valid > 1:
            middle = (valid + refused) // 2
            result = _composed(folder, verb, left[:middle])
            if isinstance(result, DictConfig):
                valid = middle
            else:
                refused, cfg = middle, result
        messages.append(hydra_message(cfg, groups) or str(cfg))
        if left:
            key = key_of(left.pop(refused - 1))
            left = [word for word in left if not key_of(word).startswith(f"{key}.")]  # keys of a choice that is missing
        if not left:
            return UserError(*dict.fromkeys(messages))
        cfg = _composed(folder, verb, left)
    with suppress(UserError):  # the refused overrides may be what is missing
        wrong = check(resolve(cfg), verb, rules=None, raw=OmegaConf.to_container(cfg, resolve=False))
        typed = [key_of(word) for word in left]
        return UserError(
            *dict.fromkeys(messages or [str(first)]), *(text for text in wrong if re.split("[=:]", text)[0] in typed)
        )
    return UserError(*dict.fromkeys(messages or [str(first)]))


def _composed(folder: Path, verb: str, overrides: Sequence[str]) -> DictConfig | Exception:
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            return compose(verb, overrides=list(overrides))
    except Exception as error:
        return error
