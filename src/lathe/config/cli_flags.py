"""Hydra's command-line flags: -m, --cfg and others. Keys are typed without dashes."""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from lathe.config.migration_hints import FLAGS
from lathe.errors import UserError, refuse, require

Groups = Mapping[str, Sequence[str]]  # what an override may begin with: groups and their choices, keys without any
MULTIRUN = ("-m", "--multirun")


def check_flags(words: Sequence[str], groups: Groups | None = None) -> argparse.Namespace:
    """Parse the flags of a command line.

    Raises:
        UserError: unknown flags, or flags that exclude each other or do nothing here.
    """
    from hydra._internal.utils import get_args_parser  # not needed for --help

    parser = get_args_parser()
    parser.error = _refuse_flag  # type: ignore[method-assign]  # argparse would print its usage and exit
    flags, rest = parser.parse_known_args(list(words))
    refuse(_as_key(word, words, groups or {}) for word in rest if word.startswith("-"))
    require(not rest, f"{' '.join(rest)}: put every flag before the first key, or after the last one.")
    exclusive = {
        "-m": flags.multirun,
        "--run": flags.run,
        "--cfg": flags.cfg,
        "--info": flags.info,
        "--shell-completion": flags.shell_completion,
    }
    given = [flag for flag, value in exclusive.items() if value]
    require(given != ["-m", "--cfg"], "-m and --cfg exclude each other: leave -m out, and give each key one value.")
    require(len(given) < 2, f"{' and '.join(given)} exclude each other: keep one.")
    for flag, value in (("--resolve", flags.resolve), (f"-p {flags.package}", flags.package)):
        require(not value or bool(flags.cfg), f"{flag} is for --cfg: add --cfg job.")
    shells = any(re.match("(install|uninstall|query)=", word) for word in flags.overrides)
    require(not flags.shell_completion or shells, "--shell-completion needs a shell: install=bash, zsh or fish.")
    rerun = flags.experimental_rerun  # it would load a pickle, which can run code
    require(rerun is None, f"--experimental-rerun {rerun} is not supported. Use python scripts/reproduce.py run=...")
    verb = Path(sys.argv[0]).stem
    name = str(flags.config_name or verb).removesuffix(".yaml")
    require(
        name == verb,
        f"--config-name {name}: each script has one configuration. Write configs/experiment/<name>.yaml, and use "
        "experiment=<name>.",
    )
    folder = flags.config_path
    require(folder is None, f"--config-path {folder} is not supported. Use --config-dir {folder} to add a folder.")
    folder = flags.config_dir
    require(folder is None or os.path.isdir(folder), f"--config-dir={folder}: there is no such folder.")
    return flags


def _refuse_flag(message: str) -> NoReturn:
    text = message.removeprefix("argument ")
    raise UserError(f"{text}: keys are written key=value, without dashes; --hydra-help lists the flags.")


def _as_key(flag: str, words: Sequence[str], groups: Groups) -> str:
    """Return the message for an unknown flag, with the key that was meant."""
    dashed, _, value = flag.partition("=")
    name = dashed.lstrip("-")
    following = next(iter(words[words.index(flag) + 1 :]), "")
    if "=" not in flag and "=" not in following and not following.startswith("-"):
        value = following
    key = name if "." in name or name in groups else FLAGS.get(name.replace("-", "_"), "")
    hint = f": {key}={value or '...'}" if key else "; --help lists the keys, --hydra-help the flags"
    return f"{f'{dashed} {value}'.strip()}: keys are written key=value, without dashes{hint}."
