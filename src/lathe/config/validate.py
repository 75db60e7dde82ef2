"""Check a resolved configuration before any data or device is used. Imports no torch."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal

from lathe.config.cross_checks import CROSS_CHECKS, SAVED_RUN_CHECKS, CrossCheck, run_checks
from lathe.config.resolve import flatten
from lathe.config.schema import Problem, command_keys, follows, key_schemas, problems
from lathe.config.values import kind_of, shown

GROUPS = ("data", "task", "model", "optimizer", "trainer", "strategy", "precision", "compile", "callbacks", "logger")
REBUILT = ("data", "task", "model", "trainer", "strategy", "precision")  # groups that a job on a finished run builds


def check(
    cfg: dict[str, Any],
    verb: str = "train",
    rules: Iterable[CrossCheck] | None = (),
    raw: Any = None,
    saved: Literal["run", "parts"] | None = None,
    more: Iterable[Problem] = (),
) -> list[str]:
    """Return a message for each mistake in a resolved configuration; each begins with its key.

    Keys are checked one by one; if all fit, `CROSS_CHECKS` and these `rules` follow (None: neither). `raw` is the
    configuration before it was resolved: a key that follows a wrong one is not reported. `more` are further mistakes
    of single keys. Of a `saved` configuration, "parts" checks only the groups that a job on a run directory builds.
    """
    is_training = command_keys("train", {}).keys() <= command_keys(verb, cfg).keys()
    is_saved = saved is not None
    keys = {key: value for key, value in cfg.items() if saved != "parts" or key in REBUILT}
    followed = follows(raw)
    read = None if raw is None else {name.split(".")[0] for names in followed.values() for name in names}
    missing = _missing_groups(cfg, is_saved) if is_training else ()
    wrong: dict[str, str] = {}
    for key, message in chain(missing, problems(keys, verb, read, is_saved), more):
        wrong.setdefault(key, message)
    messages = [
        message for key, message in wrong.items() if not ((followed.get(key, set()) | _parents(key)) & wrong.keys())
    ]
    if rules is None or wrong:
        return messages
    shipped = (SAVED_RUN_CHECKS if is_saved else CROSS_CHECKS) if is_training else ()
    return list(run_checks([*shipped, *rules], cfg))


def _parents(key: str) -> set[str]:
    names = key.split(".")
    return {".".join(names[:end]) for end in range(1, len(names))}


def _missing_groups(cfg: dict[str, Any], is_saved: bool) -> Iterator[Problem]:
    for group in [name for name in GROUPS if not isinstance(cfg.get(name), dict) and (is_saved or name in cfg)]:
        yield (
            group,
            f"{group}={shown(cfg.get(group))}: a run needs this group; choose one of the files in configs/{group}, in "
            f"a YAML file by - override /{group}: <name> in its defaults.",
        )


def check_types(
    typed: Sequence[str], cfg: dict[str, Any], defaults: dict[str, Any], verb: str = "train"
) -> Iterator[Problem]:
    """Compare the types of overridden keys that the schema does not know with those of their defaults.

    `typed` are the dotted keys of the overrides, `defaults` the configuration without them. A default of null has
    no type, and null fits every key.
    """
    values, defaults, known = flatten(cfg), flatten(defaults), key_schemas(cfg, verb)
    for key in typed:
        below = [name for name in values if f"{name}.".startswith(f"{key}.")]
        for name in below:
            default, value = defaults.get(name), values[name]
            kinds = (int, float) if type(default) is float else type(default)
            fits = isinstance(value, kinds) and isinstance(value, bool) == isinstance(default, bool)
            if name not in known and not (fits or default is None or value is None):
                yield name, f"{name}={shown(value)}: expected {kind_of(default)}, such as {shown(default)}."
        default = defaults.get(key)
        if not below:
            yield key, f"{key}: it was typed, and another word leaves it out: keep one of the two."
        elif key not in values and isinstance(default, (int, float, str)):
            yield key, f"{key} is a group of keys here: expected {kind_of(default)}, such as {shown(default)}."
