"""Translate the overrides of a command line into those that Hydra gets, or refuse them. Imports no torch."""

import re
import shlex
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from lathe.config.cli_flags import MULTIRUN, Groups, check_flags
from lathe.config.inline_nodes import NODE, expand_nodes, split_items
from lathe.config.migration_hints import CHOICES, KEYS, SUBCOMMANDS, strategy_override
from lathe.config.quoting import quote_equals
from lathe.errors import UserError, did_you_mean, require

LISTS = ("callbacks", "logger", "compression")  # groups whose choices act together
SEVERAL = (*LISTS, "target")  # groups that take several choices
REPLACED = ("experiment", "debug")  # groups whose later choices override earlier ones
NOTHING = ("", "null", "none", "None", "[]", "false", "False")  # values that mean an empty group
# Keys of Hydra's that have no effect: directories follow Lathe's rules, and Hydra's logging is off.
UNUSED = (
    *("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir", "hydra.job.chdir"),
    "hydra.verbose",
)
# Groups of Hydra's, whose choices are typed with a slash.
HYDRA_GROUPS = ("env", "help", "hydra_help", "hydra_logging", "job_logging", "launcher", "output", "sweeper")
SWEEP_FUNCTION = re.compile(r"\b(choice|range|interval)\(")
SCALAR = re.compile(r"null|true|false|[\d.]+", re.IGNORECASE)  # Hydra takes none of these for the name of a file
AUGMENT = re.compile(r"\{.*\b_target_ *: *['\"]?lathe\.data\.Augment\b", re.DOTALL)


class InvalidOverrides(UserError):
    """Overrides that can't be translated; `valid` are the others."""

    def __init__(self, messages: Sequence[str], valid: Sequence[str]) -> None:
        super().__init__(*messages)
        self.valid = valid


def key_of(override: str) -> str:
    """The dotted key of an override, without sign, package and value."""
    return override.lstrip("+~").split("=", 1)[0].split("@", 1)[0]


def value_of(override: str) -> str:
    """The text after the first = of an override."""
    return override.partition("=")[2]


def short_names(keys: Sequence[str]) -> list[str]:
    """The shortest endings that make dotted keys distinct: `lr` for `optimizer.lr`."""
    names = []
    for key in keys:
        parts = key.split(".")
        endings = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        names.append(next((end for end in endings if sum(f".{one}".endswith(f".{end}") for one in keys) == 1), key))
    return names


def translate(arguments: Sequence[str], groups: Groups) -> list[str]:
    """Return the arguments for Hydra. `groups` are the script's groups with their choices, and its root keys with none.

    Raises:
        UserError: with a message for each flag or override that can't be right.
    """
    # argparse takes no overrides after a flag that follows overrides: `train.py strategy=ddp -m seed=1,2`
    ordered = sorted(arguments, key=lambda word: word not in MULTIRUN)
    messages, ordered = find_split_words(ordered)
    try:
        flags = check_flags(ordered, groups)
    except UserError as error:
        raise UserError(*messages, *error.args) from error
    typed = set(flags.overrides)
    words: list[str] = []
    for word in _without_replaced(ordered, typed):
        try:
            words += _translate_word(word, groups) if word in typed else [word]
        except UserError as error:
            messages += error.args
    overrides = [word for word in words if word in typed or word not in ordered]
    if messages:
        raise InvalidOverrides(messages, overrides)
    known = {} if flags.config_dir else groups  # that folder may have more choices
    _check_sweeps(overrides, known, flags.multirun)
    return words


def _without_replaced(words: Sequence[str], typed: set[str]) -> list[str]:
    """Print which overrides a later one replaces, and leave those out that Hydra would merge with a later node."""
    kept: list[str] = []
    last: dict[str, str] = {}
    for word in words:
        key = key_of(word)
        earlier = last.get(key) if word in typed else None
        if earlier is not None:
            if word != earlier and not (word[0] == "+" and earlier == f"~{key}"):
                print(f"{earlier} is replaced by {word}, which was typed later.")
            if NODE.match(value_of(word)):
                kept.remove(earlier)
        if word in typed:
            last[key] = word
        kept.append(word)
    return kept


# Words that the shell has split, and words of another form


def find_split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a message for each override with missing quotes or spaces around its =, and the other words."""
    messages: list[str] = []
    others: list[str] = []
    rest = list(words)
    while rest:
        size, whole = _join_split_value(rest)
        if size:
            messages.append(f"{key_of(whole)}: the shell split its value. Quote it all: {shlex.quote(whole)}.")
        elif size := next((size for size in (3, 2) if _has_spaces(rest[:size])), 0):
            pair = rest[:size]
            messages.append(f"{' '.join(pair)}: write it without spaces around =: {''.join(pair)}.")
        else:
            others.append(rest[0])
        rest = rest[size or 1 :]
    return messages, others


def _join_split_value(words: Sequence[str]) -> tuple[int, str]:
    """Count the words into which a shell has split the first override, at spaces or by expanding braces.

    Returns that number, 0 for a whole override, and the joined override.
    """
    key, _, value = words[0].partition("=")
    if value.startswith(("[", "{")) and not split_items(value):
        for size in range(2, len(words) + 1):
            if split_items(value_of(" ".join(words[:size]))):
                return size, " ".join(words[:size])
    expanded = list(takewhile(lambda word: word.startswith(f"{key}="), words)) if "_target_:" in value[:9] else []
    items = ",".join(map(value_of, expanded))
    return (len(expanded), f"{key}={{{items}}}") if len(expanded) > 1 else (0, "")


def _has_spaces(words: Sequence[str]) -> bool:
    """True for `key = value`, `key= value` and `key =value`."""
    bare = ["=" not in word and not word.startswith(("-", "~")) for word in words]
    if len(words) == 3:
        return bare[0] and words[1] == "=" and bare[2]
    if len(words) != 2:
        return False
    return bool((re.fullmatch("[^=]+=", words[0]) and bare[1]) or (bare[0] and re.fullmatch("=[^=]+", words[1])))


def _without_equals(word: str, groups: Groups) -> str:
    """Return the message for a word without =."""
    groups_of_choice = [group for group, names in groups.items() if word in names]
    if word in groups:
        hint = f"{word}={'|'.join(groups[word]) or '...'}"
    elif groups_of_choice:
        hint = f"{groups_of_choice[0]}={word}"
    elif word in SUBCOMMANDS:
        return f"{word}: {SUBCOMMANDS[word]}."
    elif "/" in word and (key := next((key for key in ("run", "runs") if key in groups), "")):
        hint = f"{key}={word}"
    else:
        hint = "seed=1, for example. Quote a value with spaces"
    return f"{word}: every word has the form key=value: {hint}."


# One override


def _translate_word(word: str, groups: Groups) -> list[str]:
    key, value, sign = key_of(word), value_of(word), word[: len(word) - len(word.lstrip("+~"))]
    require(bool(key), f"{word!r} can't be read as an override: write key=value.")
    if "=" in word and sign != "~" and key in groups:
        value = quote_equals(key, value)
        word = f"{word.partition('=')[0]}={value}"
    require("=" in word or sign == "~" or not re.fullmatch(r"[\w.@/+-]+", word), _without_equals(word, groups))
    if (key, value) == ("train", "false") and not sign and key not in groups:
        return ["trainer.max_epochs=0"]
    if key == "local" and not sign and key in groups:
        if value in NOTHING:
            return ["~local"]
        for name in split_items(value):  # the group is optional, so Hydra ignores a missing choice
            hint = did_you_mean(name, groups[key]) if groups[key] else f"write configs/local/{name}.yaml"
            require(name in groups[key], f"local={name}: there is no such choice; {hint}")
    return _translate_choice(word, key, sign, value, groups) if groups.get(key) else _translate_key(word, sign, groups)


def _translate_key(word: str, sign: str, groups: Groups) -> list[str]:
    key, value = key_of(word), value_of(word)
    strategy = strategy_override(value) if key == "trainer.strategy" else ""
    require(not strategy, f"{word}: the strategy is a group. Write {strategy}.")
    other = key if key in KEYS else key.partition(".")[0]
    hint = KEYS.get(other, "")
    if "checkpoint" in groups and other in ("ckpt", "ckpt_path"):  # of a command on a run
        hint = f"the checkpoint of a run is run={value}" if other == "ckpt_path" else "use checkpoint=best or last"
    require(not hint or other in groups, f"{word}: unknown key; {hint}.")
    if key.partition(".")[0] == "hydra":
        _check_hydra_key(word, sign)
    if key == "data.augment" and NODE.match(value) and not AUGMENT.match(value):
        return [f"{sign}{key}=[{value}]"]  # one transform
    return [word]


def _check_hydra_key(word: str, sign: str) -> None:
    key, value = key_of(word), value_of(word)
    require(sign != "~", f"{word} would remove what Hydra needs: leave it out.")
    require(key not in UNUSED, f"{word} has no effect. The directory of a run follows from paths.log_dir and name.")
    group = key.removeprefix("hydra.")
    is_choice = group in HYDRA_GROUPS and value[:1] not in ("{", "$")
    require(not is_choice, f"{word} would choose nothing: write hydra/{group}={value or '...'}, or leave it out.")


def _translate_choice(word: str, key: str, sign: str, value: str, groups: Groups) -> list[str]:
    choices = groups[key]
    if "none" in choices:
        if (sign == "~" and not value) or (not sign and "=" in word and value in NOTHING):
            return [f"{key}=none"]
        swept = split_items(value)
        if not sign and len(swept) > 1 and set(swept) & set(NOTHING):
            return [f"{key}={','.join('none' if one in NOTHING else one for one in swept)}"]
    elif not sign and value in ("", "[]") and key not in REPLACED:
        raise UserError(f"{word}: expected a choice; choose one of {', '.join(choices)}")
    typed = word.split("=", 1)[0]
    require("@" not in typed, f"{typed}=...: the package of a group is fixed. Write {key}=<choice>, without the @.")
    inside = split_items(value[1:-1]) if value.startswith("[") and value.endswith("]") else []
    _check_number_of_choices(word, key, inside)
    default = "default," * ("default" in choices)
    if key in LISTS:
        require(not NODE.match(value), f"{word} replaces the list. Use {key}=[{default}{value}].")
        require(not sign.startswith("+"), f"{word} replaces the list. Use {key}=[{default}{value}].")
        if not sign and "{" in value:
            return expand_nodes(word, key, value, choices)
    elif NODE.match(value):  # Hydra would merge it with the file that it replaces
        return [f"~{key}", f"+{key}={value}"]
    elif sign.startswith("+"):
        return [f"{key}={value}"]
    not_names = [item for item in inside if item[0] in "[{" or SCALAR.fullmatch(item.lstrip("-"))]
    not_names += [value] if not sign and SCALAR.fullmatch(value) else []
    for item in not_names:
        require(item in choices, no_such_choice(key, item, choices, groups))
    return [word]


def _check_number_of_choices(word: str, key: str, items: Sequence[str]) -> None:
    if key in SEVERAL:
        nothing = next((item for item in items if item in NOTHING and item not in ("null", "false", "False")), None)
        require(
            nothing is None or len(items) == 1,
            f"{word}: leave {nothing} out, or use {key}=none.",
        )
        twice = next((item for item in items if not item.startswith("{") and items.count(item) > 1), None)
        require(twice is None, f"{word} has {twice} twice: leave one out.")
    elif key not in REPLACED and len(items) > 1:
        hint = f"To run each: -m {key}={','.join(items)}" if key != "sweep" else "Set the keys of the other ones"
        raise UserError(f"{word}: {key} takes one choice, {' or '.join(items)}. {hint}.")


def no_such_choice(group: str, choice: str, options: Sequence[str], groups: Groups) -> str:
    """The message for a choice that is not among the `options` of a group."""
    meant = CHOICES.get(choice, choice)
    hint = f"did you mean {meant}?" if meant in options else did_you_mean(choice, options)
    if group == "strategy" and (override := strategy_override(choice)):
        hint = f"write {override}."
    others = [name for name, names in groups.items() if name != group and choice in names]
    others.sort(key=lambda name: name == "debug")  # its choices have names of other groups' choices
    if others and choice != "default" and not hint.startswith("did you mean"):
        hint = f"{choice} is one of {others[0]}: {others[0]}={choice}."
    return f"{group}={choice}: there is no such choice; {hint}"


# Sweeps


def _check_sweeps(overrides: Sequence[str], groups: Groups, is_sweep: bool) -> None:
    """Refuse sweeps within a value, which Hydra can't run, and sweeps without a job, which it runs silently."""
    if not is_sweep and not any(map(SWEEP_FUNCTION.search, overrides)):
        return
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException:
        return  # Hydra reports it with its place
    for item in parsed:
        word = str(item.input_line)
        require(
            not _has_inner_sweep(item._value),
            f"{word}: choice, range and interval can't be part of a value: write all values by commas, as 1,2,3.",
        )
        if is_sweep and item.is_sweep_override():
            _check_sweep(item, word, groups)


def _has_inner_sweep(value: Any) -> bool:
    from hydra.core.override_parser.types import ChoiceSweep, Sweep

    inner = value.list if isinstance(value, ChoiceSweep) else value
    items = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ()
    return any(isinstance(item, Sweep) or _has_inner_sweep(item) for item in items)


def _check_sweep(override: Any, word: str, groups: Groups) -> None:
    from hydra.core.override_parser.types import Glob

    key, value = str(override.key_or_group), override.value()
    require(key.partition(".")[0] != "sweep", f"{word}: a sweep can't go over its own keys. Name one: sweep=folds.")
    require(not key.startswith("hydra."), f"{word}: a sweep can't go over Hydra's keys: give one value.")
    choices = groups.get(key)
    if isinstance(value, Glob):
        if choices is not None and not value.filter(list(choices)):
            hint = f"Choose among {', '.join(choices)}" if choices else f"{key} is not a group: write values by commas"
            raise UserError(f"{word} matches no choice, so the sweep has no job. {hint}.")
    elif override.is_discrete_sweep():
        require(
            any(True for _ in override.sweep_iterator()),  # a value may be null
            f"{word} has no values, so the sweep has no job. Give values such as 1,2,3 or range(1,4), without its end.",
        )
