"""What is wrong with a command line that Hydra refused: a sentence for each mistake, those in values that Hydra has not
come to among them.
"""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lathe.config.choice import BESIDE, NOTHING
from lathe.config.composed import check, flatten, resolve
from lathe.config.flags import FLAGS, MULTIRUN, Groups, check_flags
from lathe.config.help import configuration_folder
from lathe.config.raised import loaded_file, of_hydras_lists, of_omegaconf, override_of, unchosen, undecodable
from lathe.config.schema.check import FILLED_IN, command_keys
from lathe.config.typed import as_typed
from lathe.config.words import Untranslated, key_of, no_such_choice, without_split
from lathe.errors import UserError, did_you_mean


def _leaves_called(name: str, tree: Any) -> list[str]:
    """Full keys below `tree` that end in `name`, the shortest first; at most three. Hydra's own are none that anyone
    means."""
    leaves = flatten(OmegaConf.to_container(tree)) if isinstance(tree, DictConfig) else {}
    found = (key for key in leaves if key.endswith(f".{name}") and not key.startswith("hydra."))
    return sorted(found, key=lambda key: (key.count("."), key))[:3]


def explain(error: BaseException, groups: Groups | None = None) -> str | None:
    """One sentence for what Hydra or OmegaConf found wrong with a command line, or None if `error` is not such a
    mistake.

    `groups` are what an override may start with, to propose from: the groups with their choices, and the keys at the
    root with none.
    """
    groups = groups or {}
    if isinstance(error, UserError):
        return str(error)
    name, cause = type(error).__name__, error.__cause__
    if any(kind.__name__ == "YAMLError" for kind in type(error).__mro__):
        mark, why = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error).splitlines()[0]
        where = f"{mark.name}, line {mark.line + 1}" if mark is not None else getattr(error, "name", "a file")
        return f"{where}: the file can't be read as YAML ({why}): mend it there."
    if name == "UnicodeDecodeError":
        folders = [configuration_folder(), check_flags(sys.argv[1:]).config_dir]
        paths = (path for folder in folders if folder for path in Path(folder).rglob("*.yaml"))
        path = next(filter(undecodable, paths), None)
        return None if path is None else f"{path} can't be read as YAML (it is no UTF-8 text): write it anew."
    if name == "MissingConfigException":
        group, choice = _group_and_choice(str(getattr(error, "missing_cfg_file", None) or ""), groups)
        options = getattr(error, "options", None) or groups.get(group)  # Hydra lists none for a choice among several
        if group and options:
            return no_such_choice(group, choice, options, groups)
        return str(error).splitlines()[0]
    if name == "OverrideParseException":
        override = getattr(error, "override", "")
        if override.endswith(","):
            return f"{override}: a comma stands at its end: leave it out, or write what is to follow."
        return (
            f"{override!r} can't be read as an override: write key=value, and quote a value that has more than letters "
            f"of a to z, digits and . _ - / : in it{_quoted(override)}."
        )
    if name == "ConfigCompositionException":
        text = str(error)
        if isinstance(cause, OmegaConfBaseException):
            key = str(cause.full_key or "")
            if type(cause).__name__ == "GrammarParseError":
                return f"{key}: its ${{...}} can't be read: write ${{a.key}}, or a value."
            parent = cause.parent_node
            names = [str(k) for k in parent] if isinstance(parent, DictConfig) else []
            prefix, _, last = key.rpartition(".")
            deeper = _leaves_called(last, parent)
            deeper = [f"{prefix}.{leaf}" for leaf in deeper] if prefix else deeper
            hint = f"did you mean {' or '.join(deeper)}?" if deeper else did_you_mean(last, names)
            meant = FLAGS.get(last, "")
            if meant.partition(".")[0] in groups and not hint.startswith("did you mean"):
                hint = f"did you mean {meant}?"
            if prefix in groups and last in groups[prefix]:
                if any(typed.startswith("resume=") for typed in sys.argv[1:]):
                    return (
                        f"{key}: a run that goes on keeps its own {prefix}: leave {last} out, or start a new run from "
                        "its weights with ckpt_path."
                    )
                listed = ",".join([*{"callbacks": ["default"], "logger": ["csv"]}.get(prefix, []), last])
                return f"{key}: the run has no {last} among its {prefix}: add it by {prefix}=[{listed}]."
            if prefix and last in groups and last != prefix and not hint.startswith("did you mean"):
                hint = f"did you mean {last}?"
            return _no_such_key(key, hint)
        several = re.search(r"Ambiguous value for argument '(.+?)'", text)
        if several:
            key, _, values = several.group(1).partition("=")
            one = key in groups and groups[key] and key not in BESIDE
            way = "" if one else f", or write {key}=[{values}] for a list"
            if os.path.exists(values):
                way = f", or write {shlex.quote(f'{key}={as_typed(values)}')} for the file or folder of that name"
            return f"{several.group(1)} has several values: add -m for a sweep{way}."
        match = re.search(r"Could not (override|append|delete from config)\D*?'([^'@]+)", text)
        if match:
            word = match.group(2)
            group, _, below = word.partition("/")
            if below in groups:
                return f"{word}: a file's defaults name a group with a / before it: - override /{below}: <name>."
            if text.split(word, 1)[1].startswith("@"):  # its keys would stand below those of the file's own group
                if any(typed.lstrip("+~").startswith(f"{word}@") for typed in sys.argv[1:]):
                    return f"{word}@...: a group's keys stand in one place: write {word}=<choice>, without the @."
                return (
                    f"{word}: a YAML file chooses it below itself: let '# @package _global_' be its first line, and "
                    f"write - override /{word}: <name>."
                )
            other = re.search(r"The value of '.+' is (.*) and not ", text)
            if other:
                return f"~{word}: its value is {other.group(1)}: write ~{word}, which leaves it out whatever it is."
            if match.group(1) == "append":
                return f"+{word}: the key is there already: write it without the plus."
            if match.group(1) != "override":
                return _nothing_to_leave_out(word, groups)
            word = group
            if word in groups:
                return f"{word}: this command has no such group; --help lists what it takes."
            return f"{word}: there is no such group or key; {did_you_mean(word, groups)}"
        twice = re.search(r"Multiple values for (\S+)\. To override a value use 'override \S+ (.+)'", text)
        if twice:
            return f"{twice[1]}: a file's defaults choose it once more: write - override /{twice[1]}: {twice[2]}."
        return unchosen(text, groups) or " ".join(text.split()) or None
    if name == "HydraException":
        hint = ": give values, such as 0.1,0.01, or use another sweeper" if "sweep type" in str(error) else ""
        return " ".join(str(error).split()) + hint
    if isinstance(error, ValueError) and str(error).startswith("Config group override"):  # it is no word
        group, choice = override_of(error)
        if "deletion" in str(error):
            return f"~{group}={choice}: expected ~{group}, which leaves it out whatever its choice is."
        if choice in NOTHING:
            return f"{group}={choice}: write ~{group} to leave it out, or nothing where it holds none already."
        return no_such_choice(group, choice, groups.get(group, ()), groups)
    if of_hydras_lists(error):
        why = {"ValueError": str(error).rstrip("."), "RecursionError": "it names itself, or goes in a circle"}
        return (
            f"the defaults of a YAML file can't be read ({why.get(name) or 'something else than text'}): they hold "
            "names of files alone, as in - override /callbacks: [default,ema]; a part of your own stands in a file of "
            "its group."
        )
    if isinstance(error, OSError) and str(error).startswith("Invalid loaded object type"):
        return f"{loaded_file(error)}: expected a mapping of keys to values, got {str(error).rpartition(' ')[2]}."
    if isinstance(error, ValueError) and str(error).startswith("invalid literal for int()") and of_omegaconf(error):
        word = str(error).rpartition(": ")[2].strip("'")
        return f"{word}: a list has no such key; its items have numbers from 0, as in data.mean.0=0.5."
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key or 'the configuration'}: {str(error).splitlines()[0]}"
    return None


def _quoted(override: str) -> str:
    """The end of a sentence with an override as it is to be typed in a shell, where quotes are what it lacks."""
    from hydra.core.override_parser.overrides_parser import OverridesParser  # here: --help answers without it

    key, _, value = override.partition("=")
    if not value or value[0] in "[{('\"":  # something else than a word, which has to be closed or mended
        return ""
    word = f"{key}={as_typed(value)}"
    try:
        OverridesParser.create().parse_override(word)
    except Exception:  # its key is what can't be read
        return ""
    return ": " + (shlex.quote(word) if re.search(r'["$`!\\]', word) else f'"{word}"')


def _group_and_choice(file: str, groups: Groups) -> tuple[str, str]:
    """The group of a file that Hydra has not found, the longest that there is, and its choice: perhaps a path."""
    known = max((name for name in groups if file.startswith(f"{name}/")), key=len, default="")
    if known:
        return known, file.removeprefix(f"{known}/")
    group, _, choice = file.rpartition("/")
    return group, choice


def _nothing_to_leave_out(word: str, groups: Groups) -> str:
    """For a key that Hydra has not found to delete: it counts one whose value is null as absent."""
    if word in groups:
        return f"~{word}: its value is null, so there is nothing to leave out: leave that word out."
    hint = did_you_mean(word, groups)
    return f"~{word}: there is no such key to leave out, or its value is null{'; ' if hint else ''}{hint}"


def refused_as_well(
    error: Exception,
    folder: Path | None,
    groups: Groups,
    words: Sequence[str] | None = None,
    verb: str | None = None,
) -> list[str]:
    """A sentence for each word of this command line that is refused, where Hydra or `translate` stopped with `error`
    before the values were looked at; else none. `folder` has the configuration files. From Python, `words` and `verb`
    are what stands in the command line else."""
    from hydra import compose, initialize_config_dir  # here: --help answers without them
    from hydra.errors import HydraException

    translated = not isinstance(error, Untranslated)
    if folder is None or (translated and not isinstance(error, HydraException)):
        return []
    typed = without_split(sys.argv[1:] if words is None else words)[1]
    try:
        parsed = check_flags(sorted(typed, key=lambda word: word not in MULTIRUN))  # as `translate` has it
    except UserError as second:
        return [*(() if translated else error.args), *second.args]
    verb = verb or Path(sys.argv[0]).stem
    left = list(parsed.overrides if translated else error.left)  # type: ignore[attr-defined]
    found: list[str] = [] if translated else list(error.args)
    if parsed.multirun or parsed.config_name or parsed.config_path or parsed.config_dir:
        return found
    stopped: Exception | None = error if translated else None
    while left:
        if stopped is not None:
            sentence, wrong = explain(stopped, groups) or "", _at_fault(stopped, left, groups)
            if not wrong or sentence in found:
                break
            found.append(sentence)
            # what lies below a choice that was refused is known once there is one
            below = f"{key_of(wrong)}." if groups.get(key_of(wrong)) else "="
            left = [word for word in left if word != wrong and not key_of(word).startswith(below)]
        try:
            with initialize_config_dir(str(folder), version_base="1.3"):
                cfg = compose(verb, overrides=left)
        except HydraException as next_error:
            stopped = next_error
        else:
            told = [_subject(sentence) for sentence in found]  # a key that was typed twice is one mistake
            values = [sentence for sentence in _values(cfg, verb, left) if not _of_one_key(_subject(sentence), told)]
            return [*found, *values]
    return found


def _at_fault(error: Exception, words: Sequence[str], groups: Groups) -> str:
    """The first of these overrides that the sentence of an error of Hydra's names; empty if there is none."""
    if getattr(error, "override", None) in words:
        return str(error.override)  # type: ignore[attr-defined]
    sentence = explain(error, groups) or ""
    key = _subject(sentence)
    places = {word: re.search(rf"(?<![\w.]){re.escape(key_of(word))}(?![\w.])", sentence) for word in words}
    found = sorted((match.start(), word) for word, match in places.items() if match)
    above = [word for word in words if key_of(word).startswith(f"{key}.")]
    return found[0][1] if found else next(iter(above), "")


def _values(cfg: DictConfig, verb: str, words: Sequence[str]) -> list[str]:
    """What is wrong with the values that these overrides type, each alone."""
    try:
        sentences = check(resolve(cfg), verb, rules=None, raw=OmegaConf.to_container(cfg, resolve=False))
    except UserError:  # which may come of what was left out
        return []
    keys = [key_of(word) for word in words]
    return [sentence for sentence in sentences if _subject(sentence) in keys]


def _subject(sentence: str) -> str:
    """The key that a sentence begins with."""
    return re.split("[=:]", sentence)[0]


def _of_one_key(key: str, told: Sequence[str]) -> bool:
    """Whether a key is one of those told, above one or below one."""
    return any(f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for other in told)


def _no_such_key(key: str, hint: str) -> str:
    prefix, _, last = key.rpartition(".")
    if prefix == "trainer" and last in FILLED_IN:
        return f"{key}: there is no such key in trainer; {FILLED_IN[last]}."
    if prefix == "optimizer" and not hint:  # optimizer=none
        return f"{key}: optimizer=none has no keys; with model=lightning it is the module's own: model.net.{last}"
    if prefix == "compile" and last in command_keys("train", {})["compile"]["properties"]:
        return f"{key}: compile=none compiles nothing and has no such key: add compile=default."
    if key == "data.folder":
        return (
            f"{key}: there is no such key in data; add data=image_folder, to resume a run whose images have moved too."
        )
    where = (f" in {prefix}" if prefix else "") + (f"; {hint}" if hint else "")
    return f"{key}: there is no such key{where} (to add a new key, put a + before it)"
