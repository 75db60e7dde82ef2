"""The words of a command line: what is typed by habit is put into Lathe's terms, or told, before Hydra reads it."""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lathe.config.composed import flatten
from lathe.config.schema.trainer import FILLED_IN
from lathe.errors import UserError, did_you_mean, refuse, require

Groups = Mapping[str, Sequence[str]]
MULTIRUN = ("-m", "--multirun")
SEVERAL = ("callbacks", "logger", "compression")  # groups that take a list of choices
NOTHING = ("", "null", "none", "None", "[]", "false", "False")  # ways to say that a group is to hold no part

# Keys of other templates, with what is typed here.
HABITS = {
    "hparams_search": "a search is a sweep: python train.py -m optimizer.lr=0.03,0.1, or a sweeper of Hydra's, -m "
    "hydra/sweeper=<its name>",
    "train": "train.py always trains; to evaluate a finished run: python scripts/evaluate.py run=logs/latest",
    "task_name": "the label of a run is name=...",
    "experiment_name": "the label of a run is name=...",
    "run_name": "the label of a run is name=...",
    "datamodule": "data sets are chosen by data=...",
    "dataset": "data sets are chosen by data=...",
    "module": "tasks and nets are chosen by model=...",
    "net": "tasks and nets are chosen by model=...",
    "gpus": "devices are trainer.accelerator=gpu trainer.devices=...",
    "devices": "devices are trainer.devices=...",
    "epochs": "the length of a run is trainer.max_epochs=...",
    "ckpt": "a new run starts from ckpt_path=..., an interrupted one goes on with resume=...",
    "checkpoint": "a new run starts from ckpt_path=..., an interrupted one goes on with resume=...",
    "output_dir": "runs are written below paths.log_dir=...",
    "extras": "leave it out: warnings and tables have keys of their own, which python train.py --help lists",
    "compile_model": "compilation is compile=default",
}


def key_of(override: str) -> str:
    """The dotted key of an override, without a sign before it, a package or a value."""
    return override.lstrip("+~").split("=", 1)[0].split("@", 1)[0]


def translate(arguments: Sequence[str], groups: Groups) -> list[str]:
    """The arguments that Hydra is to get. `groups` are the script's groups with their choices, and its keys at the root
    with none.

    Raises:
        UserError: flags that do not go together, a key of another template, or a sweep without a job.
    """
    # argparse takes no overrides after a flag that follows overrides: `train.py strategy=ddp -m seed=1,2` would be
    # refused
    ordered = sorted(arguments, key=lambda word: word not in MULTIRUN)
    parsed = _check_flags(ordered)
    typed = set(parsed.overrides)
    words: list[str] = []
    refused: list[str] = []
    for word in ordered:
        try:
            words.append(_translated(word, groups) if word in typed else word)
        except UserError as error:
            refused += error.args
    refuse(refused)
    overrides = [word for word in words if word in typed or word not in ordered]
    _tell_repeated(overrides)
    if parsed.multirun:
        _check_jobs(overrides)
    return words


class _Flags(argparse.ArgumentParser):
    """Hydra's flags, whose mistakes are told in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}: python train.py --hydra-help lists the flags.")


def _check_flags(words: Sequence[str]) -> argparse.Namespace:
    """Hydra tells these with a traceback, argparse with a page."""
    from hydra._internal.utils import get_args_parser  # here: --help answers without it

    flags = get_args_parser()
    flags.__class__ = _Flags
    parsed = flags.parse_args(list(words))
    asked = [
        flag
        for flag, on in (
            ("-m", parsed.multirun),
            ("--run", parsed.run),
            ("--cfg", parsed.cfg),
            ("--info", parsed.info),
            ("--shell-completion", parsed.shell_completion),
        )
        if on
    ]
    require(
        set(asked) != {"-m", "--cfg"},
        "-m runs a sweep, and --cfg prints the configuration of one run: leave -m out, and give each key one value.",
    )
    require(len(asked) < 2, f"{' and '.join(asked)} exclude each other: keep one.")
    require(not parsed.resolve or bool(parsed.cfg), "--resolve is for --cfg: add --cfg job.")
    folder = parsed.config_dir
    require(folder is None or os.path.isdir(folder), f"--config-dir={folder}: there is no such folder.")
    return parsed


def _translated(word: str, groups: Groups) -> str:
    key, sign, value = key_of(word), word[: len(word) - len(word.lstrip("+~"))], word.partition("=")[2]
    choices = groups.get(key)
    if not choices:
        require(key not in HABITS or key in groups, f"{word}: there is no such key; {HABITS.get(key)}.")
        return word
    if "none" in choices and ((sign == "~" and not value) or (not sign and "=" in word and value in NOTHING)):
        return f"{key}=none"
    if sign.startswith("+"):
        add = (
            f"{key}=[default,{value}] to add to them"
            if "default" in choices
            else f"{key}={value}, or {key}=[...] for several"
        )
        require(key not in SEVERAL, f"{word} would take the place of the parts that are there: write {add}.")
        return f"{key}={value}"
    return word


def _tell_repeated(overrides: Sequence[str]) -> None:
    last: dict[str, str] = {}
    for word in overrides:
        key = key_of(word)
        if key in last and last[key] != word:
            print(f"{last[key]} is replaced by {word}, which was typed later.")
        last[key] = word


def _check_jobs(overrides: Sequence[str]) -> None:
    """Hydra runs a sweep over no values without a word."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        sweeps = [
            item for item in OverridesParser.create().parse_overrides(list(overrides)) if item.is_sweep_override()
        ]
    except HydraException:
        return  # Hydra tells it with its place
    for item in sweeps:
        if item.is_discrete_sweep():
            require(
                next(iter(item.sweep_iterator()), None) is not None,
                f"{item.input_line} has no values, so the sweep has no job: give "
                "values such as 1,2,3 or range(1,4), whose end does not count.",
            )


def _leaves_called(name: str, tree: Any) -> list[str]:
    """Full keys below `tree` that end in `name`, the shortest first; at most three."""
    leaves = flatten(OmegaConf.to_container(tree)) if isinstance(tree, DictConfig) else {}
    return sorted((key for key in leaves if key.endswith(f".{name}")), key=lambda key: (key.count("."), key))[:3]


def explain(error: BaseException, groups: Mapping[str, Sequence[str]] | None = None) -> str | None:
    """One sentence for what Hydra or OmegaConf found wrong with a command line, or None if `error` is not such a
    mistake.

    `groups` are what an override may start with, to propose from: the groups with their choices, and the keys at the
    root with none.
    """
    groups = groups or {}
    if isinstance(error, UserError):
        return str(error)
    name, cause = type(error).__name__, error.__cause__
    if name == "MissingConfigException":
        group, _, choice = str(getattr(error, "missing_cfg_file", None) or "").rpartition("/")
        options = getattr(error, "options", None) or groups.get(group)  # Hydra lists none for a choice among several
        if group and options:
            return _no_such_choice(group, choice, options, groups)
        return str(error).splitlines()[0]
    if name == "OverrideParseException":
        override = getattr(error, "override", "")
        return (
            f"{override!r} can't be read as an override: write key=value, and quote a value that has spaces or "
            "brackets."
        )
    if name == "ConfigCompositionException":
        text = str(error)
        if isinstance(cause, OmegaConfBaseException):
            key = str(cause.full_key or "")
            parent = cause.parent_node
            names = [str(k) for k in parent] if isinstance(parent, DictConfig) else []
            prefix, _, last = key.rpartition(".")
            deeper = _leaves_called(last, parent) if not prefix else []
            hint = f"did you mean {' or '.join(deeper)}?" if deeper else did_you_mean(last, names)
            return _no_such_key(key, hint)
        match = re.search(r"Could not override '([^'@]+)", text)
        if match:
            word = match.group(1).split("/")[0]
            return f"{word}: there is no such group or key; {did_you_mean(word, groups)}"
        return " ".join(text.split()) or None
    if isinstance(error, ValueError) and str(error).startswith("Config group override must be"):
        return f"{error}: write group=choice, such as model=mlp, or ~group to leave a group out."
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key or 'the configuration'}: {str(error).splitlines()[0]}"
    return None


def refused_as_well(error: Exception, folder: Path | None, groups: Groups) -> list[str]:
    """A sentence for each override of this command line that Hydra refuses, where it stopped with `error` at the first
    of several; else none. `folder` has the configuration files."""
    from hydra import compose, initialize_config_dir  # here: --help answers without them
    from hydra.errors import HydraException

    if not isinstance(error, HydraException) or folder is None:
        return []
    parsed, found = _check_flags(sys.argv[1:]), []
    other = parsed.multirun or parsed.config_name or parsed.config_path or parsed.config_dir
    left = [] if other or len(parsed.overrides) < 2 else list(parsed.overrides)
    while left:
        sentence = explain(error, groups) or ""
        places = {word: re.search(rf"(?<![\w.]){re.escape(key_of(word))}(?![\w.])", sentence) for word in left}
        wrong = (
            min((match.start(), word) for word, match in places.items() if match)[1:] if any(places.values()) else ()
        )
        if not wrong:
            break
        found.append(sentence)
        left.remove(*wrong)
        try:
            with initialize_config_dir(str(folder), version_base="1.3"):
                compose(Path(sys.argv[0]).stem, overrides=left)
        except HydraException as next_error:
            error = next_error
        else:
            break
    return found


def _no_such_key(key: str, hint: str) -> str:
    prefix, _, last = key.rpartition(".")
    if prefix == "trainer" and last in FILLED_IN:
        return f"{key}: there is no such key in trainer; {FILLED_IN[last]}."
    where = (f" in {prefix}" if prefix else "") + (f"; {hint}" if hint else "")
    return f"{key}: there is no such key{where} (to add a new key, put a + before it)"


def _no_such_choice(group: str, choice: str, options: Sequence[str], groups: Groups) -> str:
    hint = did_you_mean(choice, options)
    others = [name for name, names in groups.items() if name != group and choice in names]
    if others and not hint.startswith("did you mean"):
        hint = f"{choice} is one of {others[0]}: {others[0]}={choice}."
    return f"{group}={choice}: there is no such choice; {hint}"
