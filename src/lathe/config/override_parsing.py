"""Translate the overrides of a command line into those that Hydra gets, or refuse them. Imports no torch."""

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from lathe.errors import UserError, did_you_mean, require

Groups = Mapping[str, Sequence[str]]  # what an override may begin with: groups and their choices, keys without any
MULTIRUN = ("-m", "--multirun")
# Groups whose choices act together, and the choices that a further one is added to.
LISTS: dict[str, list[str]] = {"callbacks": ["default"], "logger": ["csv"], "compression": []}
SEVERAL = (*LISTS, "target")  # groups that take several choices
REPLACED = ("experiment", "debug")  # groups whose later choices override earlier ones
NOTHING = ("", "null", "none", "None", "[]", "false", "False")  # values that mean an empty group
# Keys of Hydra's that have no effect: directories follow Lathe's rules, and Hydra's logging is off.
UNUSED = (
    *("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir", "hydra.job.chdir"),
    "hydra.verbose",
)
_SPACED = re.compile(r"[\w.@/+]+( = |= | =)[^\s=]\S*")  # key = value, key= value, key =value
SCALAR = re.compile(r"null|true|false|[\d.]+", re.IGNORECASE)  # Hydra takes none of these for the name of a file
NODE = re.compile(r"\{.*\b_target_ *:", re.DOTALL)
_BRACKETS = {"[": "]", "{": "}", "(": ")"}
_TARGET = re.compile(r"_target_ *: *['\"]?([\w.]+)")
_NAMED_NODE = re.compile(r"(\w+) *: *(\{.*\})", re.DOTALL)
_WORD_BREAK = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_QUOTES = ("'", '"')
# Keys whose value may contain =, in an override (baseline=optimizer.lr=0.1) or a path (.../epoch=4-step=100.ckpt).
_SIDES = ("baseline", "candidate")  # labels of groups, or whole lists of overrides
_WITH_EQUALS = (*_SIDES, "run", "ckpt_path", "resume", "checkpoint", "input", "output")
AUGMENT = re.compile(r"\{.*\b_target_ *: *['\"]?lathe\.data\.Augment\b", re.DOTALL)
# What users of other templates type first, and Lathe's word for it.
KEYS = {
    "hparams_search": "a search is a sweep: python train.py -m optimizer.lr=0.03,0.1, or sweep=optuna with sweep.space",
    "train": "train=false tests the weights of ckpt_path=... without training",
    "task_name": "the label of a run is name=...",
    "datamodule": "data sets are chosen by data=...",
    "trainer.gpus": "devices are trainer.accelerator=gpu trainer.devices=...",
    "epochs": "the length of a run is trainer.max_epochs=...",
    "ckpt": "a new run starts from ckpt_path=..., an interrupted one continues with resume=...",
    "extras": "leave it out: python train.py --help lists the keys of warnings and tables",
}
CHOICES = {"resnet": "resnet20", "16": "16-mixed", "bf16": "bf16-mixed"}


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
        names.append(next((end for end in endings if sum(f".{other}".endswith(f".{end}") for other in keys) == 1), key))
    return names


def translate(arguments: Sequence[str], groups: Groups) -> list[str]:
    """Return the arguments for Hydra. `groups` are the script's groups with their choices, and its root keys with none.

    Raises UserError with a message for each flag or override that can't be right.
    """
    # argparse takes no overrides after a flag that follows overrides: `train.py strategy=ddp -m seed=1,2`
    ordered = sorted(arguments, key=lambda word: word not in MULTIRUN)
    messages, ordered = find_split_words(ordered)
    try:
        flags = check_flags(ordered)
    except UserError as error:
        raise UserError(*messages, *error.args) from error
    typed = set(flags.overrides)
    unique: list[str] = []
    for word in ordered:
        earlier = next((other for other in unique if other in typed and key_of(other) == key_of(word)), None)
        if word in typed and earlier is not None:
            if word != earlier and not (word[0] == "+" and earlier[0] == "~"):
                print(f"{earlier} is replaced by {word}, which was typed later.")
            if NODE.match(value_of(word)):  # Hydra would merge the two
                unique.remove(earlier)
        unique.append(word)
    translated: list[str] = []
    for word in unique:
        try:
            translated += _translate_word(word, groups) if word in typed else [word]
        except UserError as error:
            messages += error.args
    overrides = [word for word in translated if word in typed or word not in ordered]
    if messages:
        raise InvalidOverrides(messages, overrides)
    return translated


# Hydra's flags: -m, --cfg and others


def check_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the flags of a command line; raise UserError for unknown ones, and for those that are not supported."""
    from hydra._internal.utils import get_args_parser  # not needed for --help

    parser = get_args_parser()
    parser.error = _refuse_flag  # type: ignore[method-assign]  # argparse would print its usage and exit
    flags, rest = parser.parse_known_args(list(arguments))
    for word in rest:
        if word.startswith("-"):
            _refuse_flag(word)
    require(not rest, f"{' '.join(rest)}: put every flag before the first key, or after the last one.")
    rerun = flags.experimental_rerun  # it would load a pickle, which can run code
    require(rerun is None, f"--experimental-rerun {rerun} is not supported. Use python scripts/reproduce.py run=...")
    name, path, folder = flags.config_name, flags.config_path, flags.config_dir
    is_own = name is None or name.removesuffix(".yaml") == Path(sys.argv[0]).stem
    require(is_own, f"--config-name {name} is not supported. Write configs/experiment/<name>.yaml.")
    require(path is None, f"--config-path {path} is not supported. Use --config-dir {path} to add a folder.")
    require(folder is None or os.path.isdir(folder), f"--config-dir={folder}: there is no such folder.")
    return flags


def _refuse_flag(message: str) -> NoReturn:
    text = message.removeprefix("argument ")
    raise UserError(f"{text}: keys are written key=value, without dashes; --hydra-help lists the flags.")


# Words that the shell has split, and words of another form


def find_split_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a message for each override with missing quotes or spaces around its =, and the other words."""
    messages: list[str] = []
    others: list[str] = []
    rest = list(arguments)
    while rest:
        whole = 1  # so many words are one override, whose value has an open bracket
        if value_of(rest[0]).startswith(("[", "{")):
            sizes = range(1, len(rest) + 1)
            whole = next((size for size in sizes if split_items(value_of(" ".join(rest[:size])))), 1)
        spaced = next((size for size in (3, 2) if _SPACED.fullmatch(" ".join(rest[:size]))), 0)
        if whole > 1:
            word = " ".join(rest[:whole])
            messages.append(f"{key_of(word)}: the shell split its value. Quote it all: {shlex.quote(word)}.")
        elif spaced:
            pair = rest[:spaced]
            messages.append(f"{' '.join(pair)}: write it without spaces around =: {''.join(pair)}.")
        else:
            others.append(rest[0])
        rest = rest[max(whole, spaced, 1) :]
    return messages, others


# One override


def _translate_word(word: str, groups: Groups) -> list[str]:
    key, value, sign = key_of(word), value_of(word), word[: len(word) - len(word.lstrip("+~"))]
    if "=" in word and sign != "~" and key in groups:
        value = quote_equals(key, value)
        word = f"{word.partition('=')[0]}={value}"
    is_swept = key.partition(".")[0] in ("sweep", "hydra") and len(split_items(value)) > 1
    require(not is_swept, f"{word}: a sweep can't go over its own keys and Hydra's.")
    if "=" not in word and sign != "~" and re.fullmatch(r"[\w.@/+-]+", word):
        group = next((group for group, names in groups.items() if word in names), "")
        run = next((name for name in ("run", "runs") if name in groups and "/" in word), "")
        hint = "seed=1, for example. Quote a value with spaces"
        if word in groups or group or run:
            hint = f"{word}=..." if word in groups else f"{group or run}={word}"
        raise UserError(f"{word}: every word has the form key=value: {hint}.")
    if (key, value) == ("train", "false") and not sign and key not in groups:
        return ["trainer.max_epochs=0"]
    if key == "local" and not sign and key in groups:
        if value in NOTHING:
            return ["~local"]
        for name in split_items(value):  # the group is optional, so Hydra ignores a missing choice
            hint = did_you_mean(name, groups[key]) if groups[key] else f"write configs/local/{name}.yaml"
            require(name in groups[key], f"local={name}: there is no such choice; {hint}")
    if groups.get(key):
        return _translate_choice(word, key, sign, value, groups)
    other = key if key in KEYS else key.partition(".")[0]
    hint = KEYS.get(other, "")
    require(not hint or other in groups, f"{word}: unknown key; {hint}.")
    require(key not in UNUSED, f"{word} has no effect. The directory of a run follows from paths.log_dir and name.")
    if key == "data.augment" and NODE.match(value) and not AUGMENT.match(value):
        return [f"{sign}{key}=[{value}]"]  # one transform
    return [word]


def _translate_choice(word: str, key: str, sign: str, value: str, groups: Groups) -> list[str]:
    choices, typed = groups[key], word.split("=", 1)[0]
    require("@" not in typed, f"{typed}=...: the package of a group is fixed. Write {key}=<choice>, without the @.")
    if "none" in choices:
        if (sign == "~" and not value) or (not sign and "=" in word and value in NOTHING):
            return [f"{key}=none"]
        swept = split_items(value)
        if not sign and len(swept) > 1 and set(swept) & set(NOTHING):
            return [f"{key}={','.join('none' if choice in NOTHING else choice for choice in swept)}"]
    elif not sign and value in ("", "[]") and key not in REPLACED:
        raise UserError(f"{word}: expected a choice; choose one of {', '.join(choices)}")
    inside = split_items(value[1:-1]) if value.startswith("[") and value.endswith("]") else []
    twice = next((item for item in inside if item[0] != "{" and inside.count(item) > 1), None)
    require(twice is None, f"{word}: {twice} is there twice. Leave one out.")
    if key in SEVERAL:
        require("none" not in inside or len(inside) == 1, f"{word}: leave none out, or use {key}=none.")
    elif key not in REPLACED and len(inside) > 1:
        raise UserError(f"{word}: {key} takes one choice. To run each: -m {key}={','.join(inside)}.")
    default = "default," * ("default" in choices)
    if key in LISTS:
        replaces = NODE.match(value) or sign.startswith("+")
        require(not replaces, f"{word} replaces the list. Use {key}=[{default}{value}].")
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


def no_such_choice(group: str, choice: str, options: Sequence[str], groups: Groups) -> str:
    """The message for a choice that is not among the `options` of a group."""
    meant = CHOICES.get(choice, choice)
    hint = f"did you mean {meant}?" if meant in options else did_you_mean(choice, options)
    others = [name for name, names in groups.items() if name != group and choice in names]
    others.sort(key=lambda name: name == "debug")  # its choices have names of other groups' choices
    if others and choice != "default" and not hint.startswith("did you mean"):
        hint = f"{choice} is one of {others[0]}: {others[0]}={choice}."
    if group == "optimizer":
        hint += " Or a class: 'optimizer={_target_: torch.optim.Adam, lr: 0.001}'."
    return f"{group}={choice}: there is no such choice; {hint}"


# Nodes in the list of a group, as in callbacks=[default,{_target_: mine.Largest}]


def expand_nodes(word: str, key: str, value: str, choices: Sequence[str]) -> list[str]:
    """Return the overrides for a group's list: one with the names in it, and one for each node.

    A list without nodes, or with an open bracket or quote, is returned as it is.
    """
    items = split_items(value[1:-1]) if value.startswith("[") and value.endswith("]") else []
    nodes = [item for item in items if item.startswith("{")]
    if not nodes:
        is_sweep = not value.startswith("{") and split_items(value) and not items and re.search(r"[\[,] *\{", value)
        require(not is_sweep, f"{word}: a sweep takes names of files. Write the nodes as configs/{key}/<name>.yaml.")
        return [word]
    names = [item for item in items if item not in nodes]
    added: dict[str, str] = {}
    for item in nodes:
        for name, node in _named(word, item, choices):
            numbered = (f"{name}_{n}" for n in count(2) if f"{name}_{n}" not in choices)
            added[name if name not in added else next(new for new in numbered if new not in added)] = node
    return [
        f"{key}=[{','.join(names)}]" if names else f"{key}=none",
        *(f"+{key}.{name}={node}" for name, node in added.items()),
    ]


def _named(word: str, item: str, choices: Sequence[str]) -> list[tuple[str, str]]:
    """Return names and nodes of a mapping, which is a node or has nodes by name."""
    entries = split_items(item[1:-1])
    named = [match for entry in entries if (match := _NAMED_NODE.fullmatch(entry)) is not None]
    if entries and len(named) == len(entries):
        return [(match[1], match[2]) for match in named]
    targets = [match for entry in entries if (match := _TARGET.match(entry)) is not None]
    require(len(targets) == 1, f"{word}: {item} names no class: write {{_target_: package.module.Class, ...}}.")
    name = _WORD_BREAK.sub("_", targets[0][1].split(".")[-1]).lower()
    return [(f"own_{name}" if name in choices else name, item)]  # that file's keys are those of another class


def split_items(text: str) -> list[str]:
    """Split at the commas outside of brackets and quotes; [] if one of those is not closed."""
    items, start, brackets, quote = [], 0, list[str](), ""
    for position, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote and text[position - 1] != "\\" else quote
        elif sign in "'\"":
            quote = sign
        elif sign in _BRACKETS:
            brackets.append(_BRACKETS[sign])
        elif brackets and sign == brackets[-1]:
            brackets.pop()
        elif sign == "," and not brackets:
            items.append(text[start:position].strip())
            start = position + 1
    return [] if brackets or quote else [item for item in (*items, text[start:].strip()) if item]


# Values in Hydra's grammar


def quote_equals(key: str, value: str) -> str:
    """Quote the value of a key if it contains =."""
    if key == "where":
        items = split_items(value[1:-1] if value.startswith("[") and value.endswith("]") else value)
        return f"[{','.join(item if item[0] in _QUOTES else repr(item) for item in items)}]" if items else value
    is_bare = "=" in value and ("," not in value or key in _SIDES) and value[0] not in (*_QUOTES, "[", "$")
    return as_typed(value) if is_bare and key in _WITH_EQUALS else value


def as_typed(value: Any) -> str:
    """Return a plain value as an override has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_typed(item)}" for key, item in value.items()) + "}"
    # backslashes are doubled before a quote, and only there
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", re.sub(r"(\\+)$", r"\1\1", str(value))) + "'"
