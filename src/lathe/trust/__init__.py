"""What a run directory from elsewhere may make this program do: a saved configuration is checked when it is read,
before anything that it names is imported. docs/security.md states the model. Imports no torch.

`trusted` and the names that stand in the current command hold for this process and those that it starts: they travel in
an environment variable that each command sets anew.
"""

import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

from lathe.errors import UserError
from lathe.trust import own
from lathe.trust.check import GETTERS, KINDS, Finding, findings, kind_at, names_in
from lathe.trust.document import read_json, read_signed, read_yaml, shown

__all__ = ["allow", "allow_program", "ask", "carried", "checked_config", "checked_overrides", "read_json", "tell_owner"]

CARRIER = "LATHE_TRUSTED"
PLAIN_NAME = re.compile(r"[^/\\\0]+")
ITEM = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|\w[\w+.-]*:\S+")  # a package, a name in one, or an address
_asks = False
_told: set[str] = set()


def ask(wanted: bool) -> None:
    """From now on, names that are refused are shown and asked for, or not: the flag --trust."""
    global _asks
    _asks = wanted


def allow(cfg: dict[str, Any]) -> None:
    """Takes `trusted` out of the current command's configuration. What it lists, and what the command itself names,
    holds from now on for every saved configuration that this process or one that it starts reads.

    Raises:
        UserError: `trusted` is no list of names.
    """
    trusted = cfg.pop("trusted", None) or []
    if not isinstance(trusted, list):
        raise UserError(f"trusted={trusted!r}: expected a list of packages, such as trusted=[timm].")
    for item in trusted:
        if not isinstance(item, str) or not ITEM.fullmatch(item):
            raise UserError(
                f"trusted={item!r}: expected the name of a package or of a part of one, such as trusted=[timm]."
            )
    _carry(trusted, names_in(cfg))


def allow_program(target: str, folder: Path) -> None:
    """Lets the export in `folder`, a program that this user has not made here, be loaded if `target` is trusted or,
    with --trust, is so now.

    Raises:
        UserError: it is not.
    """
    trusted, typed = carried()
    if target in trusted:
        return
    words = f"target={target}: {folder} is a program that you have not exported here, and loading it runs it"
    way = f"add trusted=[{target}]"
    if not _asks:
        raise UserError(f"{words}; if you trust it, {way} or --trust, or export the run again.")
    _answered(
        f"{words}.",
        f"{words}, and --trust asks on a terminal, which this is not: {way} if you trust it.",
        f"{words}: not trusted.",
    )
    _carry([*trusted, target], typed)


def _answered(question: str, nobody: str, refused: str) -> None:
    """Asks, and returns if the answer is yes."""
    if not sys.stdin.isatty():
        raise UserError(nobody)
    print(question)
    if input("Go on? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError(refused)


def _carry(trusted: list[str], typed: dict[str, str]) -> None:
    os.environ[CARRIER] = json.dumps({"trusted": trusted, "typed": typed})


def carried() -> tuple[list[str], dict[str, str]]:
    """What is trusted, and the names in the current command by their keys."""
    there: dict[str, Any] = json.loads(os.environ.get(CARRIER) or "{}")
    return there.get("trusted", []), there.get("typed", {})


def checked_config(path: Path, where: str, kinds: bool = True) -> dict[str, Any]:
    """The configuration in the file `path`, a run's config.yaml, if all that it names may be built.

    `where` begins each sentence. Without `kinds`, nothing is imported, and the result is for reading alone, not for
    building.

    Raises:
        UserError: it is no configuration, or names what a saved configuration may not build.
        OSError: it can't be read.
    """
    words = f"{where}: its config.yaml"
    config, signed = read_signed(path, words)
    if not isinstance(config, dict):
        raise UserError(f"{words} can't be read as a configuration.")
    if not isinstance(config.get("name", "x"), str) or not _plain(config.get("name", "x")):
        raise UserError(
            f"{words} has name={shown(repr(config['name']))}, which is no name of a folder: it is not read."
        )
    trusted, typed = carried()
    if signed:  # this user's own command named these
        typed = typed | names_in(config)
    found = list(findings(config, trusted, typed))
    for finding in found:
        if not finding.mend:
            there = f"`{shown(finding.name)}` at {shown(finding.key)}"
            raise UserError(f"{words} names {there}, {finding.why}: take a run directory as Lathe has written it.")
    if found:
        _ask_for(found, words)
        trusted, _ = carried()
    if kinds:
        _check_kinds(config, words, trusted, typed)
    config.pop("trusted", None)
    return {str(key): value for key, value in config.items()}


def _plain(name: str) -> bool:
    return PLAIN_NAME.fullmatch(name) is not None and name not in (".", "..")


def _ask_for(found: list[Finding], words: str) -> None:
    """Refuses what was found, or with --trust asks for it.

    Raises:
        UserError: there is nobody to ask, or the answer is no.
    """
    first, names = found[0], sorted({finding.name for finding in found})
    listed = ",".join(shown(name) for name in names[:8])
    if not _asks:
        there = f"`{shown(first.name)}` at {shown(first.key)}" + (
            f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        )
        raise UserError(
            f"{words} names {there}, which is not a part that a saved configuration may build; if you trust "
            f"it, add trusted=[{listed}] or --trust."
        )
    rows = "".join(f"\n  {shown(finding.key)}: {shown(finding.name)}" for finding in found)
    _answered(
        f"{words} names parts that could run any code as you:{rows}",
        f"{words} names {listed}, and --trust asks on a terminal, which this is not: add trusted=[{listed}] if you "
        "trust them.",
        f"{words} names {listed}: not trusted, so nothing of it was built.",
    )
    trusted, typed = carried()
    _carry([*trusted, *names], typed)


def _check_kinds(config: dict[str, Any], words: str, trusted: list[str], typed: dict[str, str]) -> None:
    """Holds parts of the user's own and of trusted packages against what their keys take. Imports those packages.

    Raises:
        UserError: one is of another kind.
    """
    from lathe.trust.parts import listed

    for key, name in names_in(config).items():
        kind = kind_at(key.removesuffix(".path"))
        if kind is None or name in GETTERS or listed(name, kind) or typed.get(key) == name:
            continue
        wrong = own.wrong_kind(name, "" if key.startswith("model.init") else kind, name in trusted)
        if wrong is not None:
            what = "an init" if key.startswith("model.init") else KINDS[kind]
            raise UserError(
                f"{words} names `{shown(name)}` at {shown(key)}, which takes {what}, and {wrong}: it is not built."
            )


def checked_overrides(path: Path, where: str) -> list[str]:
    """What was typed when a run was started, from its overrides.yaml, if composing it again only chooses and sets.

    Raises:
        UserError: it is no list of overrides, or one would do more.
        OSError: it can't be read.
    """
    words = f"{where}: its overrides.yaml"
    if not path.is_file():
        raise UserError(f"{words} is not there: take a run directory as Lathe has written it.")
    content = read_yaml(path, words)
    if not isinstance(content, list) or not all(isinstance(item, str) for item in content):
        raise UserError(f"{words} can't be read as a list of overrides.")
    for item in content:
        if re.match(r"[+~]*hydra\b", item):  # a search path imports what it names
            raise UserError(f"{words} holds {item[:80]!r}, which changes Hydra itself: it is not read.")
    return content


def tell_owner(*paths: Path) -> None:
    """Says in one line that a directory, or a file in it, belongs to another user of this machine."""
    if not hasattr(os, "getuid"):
        return
    for path in paths:
        try:
            owner = os.lstat(path) if path.is_symlink() else path.stat()
        except OSError:
            continue
        if owner.st_uid not in (os.getuid(), 0) and str(path) not in _told:
            _told.add(str(path))
            folder = "directory" if stat.S_ISDIR(owner.st_mode) else "file"
            print(f"Note: the {folder} {path} belongs to another user ({_name_of(owner.st_uid)}).", file=sys.stderr)
            return


def _name_of(uid: int) -> str:
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return str(uid)
