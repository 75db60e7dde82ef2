"""The flags of a command line, which are Hydra's: -m, --cfg and the like. Keys are typed without dashes."""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from lathe.errors import UserError, refuse, require

Groups = Mapping[str, Sequence[str]]
MULTIRUN = ("-m", "--multirun")
# What is typed as a flag elsewhere, with the key that it is here.
FLAGS = {
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "wd": "optimizer.weight_decay",
    "weight_decay": "optimizer.weight_decay",
    "batch_size": "data.batch_size",
    "epochs": "trainer.max_epochs",
    "max_epochs": "trainer.max_epochs",
    "max_steps": "trainer.max_steps",
    "accelerator": "trainer.accelerator",
    "devices": "trainer.devices",
    "gpus": "trainer.devices",
    "output_dir": "paths.log_dir",
}


class _Flags(argparse.ArgumentParser):
    """Hydra's flags, whose mistakes are told in one sentence."""

    def error(self, message: str) -> NoReturn:
        what = message.removeprefix("argument ")
        raise UserError(f"{what}: keys are written key=value, without dashes; --hydra-help lists the flags.")


def check_flags(words: Sequence[str], groups: Groups | None = None) -> argparse.Namespace:
    """Hydra tells these with a traceback, argparse with a page."""
    from hydra._internal.utils import get_args_parser  # here: --help answers without it

    flags = get_args_parser()
    flags.__class__ = _Flags
    parsed, rest = flags.parse_known_args(list(words))
    refuse(_as_key(word, words, groups or {}) for word in rest if word.startswith("-"))
    require(not rest, f"{' '.join(rest)}: keys stand together: put every flag before the first of them, or after all.")
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
    require(not parsed.package or bool(parsed.cfg), f"-p {parsed.package} is for --cfg: add --cfg job.")
    require(
        not parsed.shell_completion or any(re.match("(install|uninstall|query)=", word) for word in parsed.overrides),
        "--shell-completion: say for which shell: install=bash, zsh or fish (or uninstall=...), as in "
        'eval "$(python train.py --shell-completion install=bash)".',
    )
    require(  # it would load a pickle, which is a program
        parsed.experimental_rerun is None,
        f"--experimental-rerun {parsed.experimental_rerun}: runs leave no pickle of Hydra's: one is made again by "
        "python scripts/reproduce.py run=...",
    )
    verb = Path(sys.argv[0]).stem
    name = str(parsed.config_name or verb).removesuffix(".yaml")
    require(  # the schema, and what the script does with it, are of its own
        name == verb,
        f"--config-name {name}: each script has one configuration of its own: leave it out, and put what is to be "
        "otherwise into configs/experiment/<name>.yaml, for experiment=<name>.",
    )
    require(
        parsed.config_path is None,
        f"--config-path {parsed.config_path}: leave it out; --config-dir {parsed.config_path} adds the files of a "
        "folder of your own to those of configs.",
    )
    folder = parsed.config_dir
    require(folder is None or os.path.isdir(folder), f"--config-dir={folder}: there is no such folder.")
    return parsed


def _as_key(flag: str, words: Sequence[str], groups: Groups) -> str:
    """The sentence for a flag that there is not: what is typed in its place, as far as that is known."""
    dashed, _, value = flag.partition("=")
    name = dashed.lstrip("-")
    after = next(iter(words[words.index(flag) + 1 :]), "")
    if "=" not in flag and "=" not in after and not after.startswith("-"):
        value = after
    key = name if "." in name or name in groups else FLAGS.get(name.replace("-", "_"), "")
    typed = f"{dashed} {value}".strip()
    way = f": {key}={value or '...'}" if key else "; --help lists the keys, --hydra-help the flags"
    return f"{typed}: keys are written key=value, without dashes{way}."
