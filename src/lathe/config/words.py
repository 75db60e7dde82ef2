"""The words of a command line: what is typed by habit is put into Lathe's terms, or told, before Hydra reads it."""

import re
import shlex
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from lathe.config.choice import NOTHING, OVER, SEVERAL, check_choice, check_local, check_swept
from lathe.config.flags import MULTIRUN, Groups, check_flags
from lathe.config.habits import HABITS, VERBS, strategy_of
from lathe.config.listed import WHOLE_NODE, spread, top_level
from lathe.config.typed import in_quotes
from lathe.errors import UserError, did_you_mean, require

# Hydra's own, which would be taken and do nothing: a run has a directory by Lathe's rules.
UNUSED = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir", "hydra.job.chdir")
# Those that Hydra fills in itself, or that say how it logs, which is nothing here.
FILLED = ("hydra.job.num", "hydra.job.id", "hydra.job.override_dirname", "hydra.job.config_name", "hydra.verbose")
# Those of Hydra's keys that choose a file, where a name in a key's place would be taken and choose none.
HYDRAS = ("callbacks", "env", "help", "hydra_help", "hydra_logging", "job_logging", "launcher", "output", "sweeper")
# What is typed for a choice, where the nearest name is another one.
MEANT = {
    "resnet": "resnet20",
    "16": "16-mixed",
    "fp16": "16-mixed",
    "bf16": "bf16-mixed",
    "32": "32-true",
    "tb": "tensorboard",
}
FUNCTION = re.compile(r"\b(choice|range|interval)\(")  # of several values
SCALAR = re.compile(r"null|true|false|[\d.]+", re.IGNORECASE)  # what Hydra does not take for the name of a file
FIELDS = re.compile(r"\{.*\b_target_ *: *['\"]?lathe\.data\.Augment\b", re.DOTALL)


class Untranslated(UserError):
    """Words that mean nothing here; `left` are the others."""

    def __init__(self, sentences: Sequence[str], left: Sequence[str]) -> None:
        super().__init__(*sentences)
        self.left = left


def key_of(override: str) -> str:
    """The dotted key of an override, without a sign before it, a package or a value."""
    return override.lstrip("+~").split("=", 1)[0].split("@", 1)[0]


def short_names(keys: Sequence[str]) -> list[str]:
    """The shortest endings of dotted keys by which they differ: `lr` for `optimizer.lr`."""
    names = []
    for key in keys:
        parts = key.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        names.append(next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in keys) == 1), key))
    return names


def translate(arguments: Sequence[str], groups: Groups) -> list[str]:
    """The arguments that Hydra is to get. `groups` are the script's groups with their choices, and its keys at the root
    with none.

    Raises:
        UserError: flags that do not go together, a key of another template, or a sweep without a job.
    """
    # argparse takes no overrides after a flag that follows overrides: `train.py strategy=ddp -m seed=1,2` would be
    # refused
    ordered = sorted(arguments, key=lambda word: word not in MULTIRUN)
    refused, ordered = without_split(ordered)
    try:
        parsed = check_flags(ordered, groups)
    except UserError as error:
        raise UserError(*refused, *error.args) from error
    typed = set(parsed.overrides)
    words: list[str] = []
    for word in ordered:
        try:
            new = _translated(word, groups) if word in typed else [word]
            words = [*_without_earlier(words, word, new), *new]
        except UserError as error:
            refused += error.args
    if refused:
        raise Untranslated(refused, [word for word in words if word in typed or word not in ordered])
    overrides = [word for word in words if word in typed or word not in ordered]
    _tell_repeated(overrides)
    _check_inside([word for word in overrides if FUNCTION.search(word)])
    if parsed.multirun:
        _check_jobs(overrides, {} if parsed.config_dir else groups)  # such a folder may bring choices
    return words


def _without_earlier(words: list[str], word: str, new: Sequence[str]) -> list[str]:
    """Those before `word`, which is `new` now, that have a place beside it: Hydra would mix a whole part with one that
    was typed for the same key before."""
    key = key_of(word)
    if not WHOLE_NODE.match(word.partition("=")[2]):
        return words
    earlier = [old for old in words if key_of(old) == key and WHOLE_NODE.match(old.partition("=")[2])]
    for old in earlier:
        if old.lstrip("+") != word.lstrip("+"):
            print(f"{old.lstrip('+')} is replaced by {word}, which was typed later.")
    around = (new[0], f"{key}=none") if new[0].startswith("~") else ()  # left out, or chosen to be none, before
    return [old for old in words if old not in (*earlier, *around)]


def without_split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A sentence for each override that a shell has split, or that has spaces around its =, and the other words."""
    sentences: list[str] = []
    left: list[str] = []
    rest = list(words)
    while rest:
        size, whole = _split(rest)
        if size:
            sentences.append(
                f"{key_of(whole)}: the shell split its value. Quote the whole override: {shlex.quote(whole)}."
            )
        else:
            size = next((size for size in (3, 2) if _is_spaced(rest[:size])), 1)
            pair = rest[:size]
            if size == 1:
                left += pair
            else:
                sentences.append(f"{' '.join(pair)}: write it without spaces around =: {''.join(pair)}.")
        rest = rest[size:]
    return sentences, left


def _split(words: Sequence[str]) -> tuple[int, str]:
    """The number of these words that are one override without quotes, which a shell splits at spaces and, without
    spaces, expands at braces; and that override. 0 where the first is whole."""
    key, _, value = words[0].partition("=")
    if value.startswith(("[", "{")) and not top_level(value):
        for size in range(2, len(words) + 1):
            if top_level(" ".join(words[:size]).partition("=")[2]):
                return size, " ".join(words[:size])
    expanded = list(takewhile(lambda word: word.startswith(f"{key}="), words)) if "_target_:" in value[:9] else []
    items = ",".join(word.partition("=")[2] for word in expanded)
    return (len(expanded), f"{key}={{{items}}}") if len(expanded) > 1 else (0, "")


def _is_spaced(words: Sequence[str]) -> bool:
    """Whether these are `key = value`, `key= value` or `key =value`."""
    bare = ["=" not in word and not word.startswith(("-", "~")) for word in words]
    if len(words) == 3:
        return bare[0] and words[1] == "=" and bare[2]
    ends = len(words) == 2 and bool(re.fullmatch(r"[^=]+=", words[0])) and bare[1]
    return ends or (len(words) == 2 and bare[0] and bool(re.fullmatch("=[^=]+", words[1])))


def _formless(word: str, groups: Groups) -> str:
    """The sentence for a word that is no override."""
    holders = [group for group, names in groups.items() if word in names]
    if word in groups:
        way = f"{word}={'|'.join(groups[word]) or '...'}"
    elif word in VERBS and not holders:
        return f"{word}: {VERBS[word]}."
    elif "/" in word and (key := next((key for key in ("run", "runs") if key in groups), "")):
        way = f"{key}={word}"
    else:
        way = f"{holders[0]}={word}" if holders else "seed=1, say; a value with spaces in it stands in quotes"
    return f"{word}: every word has the form key=value: {way}."


def earlier(word: str) -> str:
    """An override as it is written now: what was a key of the model's file, and is one of the task's, may be added."""
    return f"++{word}" if re.match(r"model\.(label_smoothing|_target_)=", word) else word


def _translated(word: str, groups: Groups) -> list[str]:
    key, sign, value = key_of(word), word[: len(word) - len(word.lstrip("+~"))], word.partition("=")[2]
    choices = groups.get(key)
    if "=" in word and sign != "~" and key in groups:
        value = in_quotes(key, value)
        word = f"{word.partition('=')[0]}={value}"
    require(bool(key), f"{word!r} can't be read as an override: write key=value.")
    require("=" in word or sign == "~" or not re.fullmatch(r"[\w.@/+-]+", word), _formless(word, groups))
    typed = strategy_of(value) if key == "trainer.strategy" else ""
    require(not typed, f"{word} is not taken from here: write {typed}.")
    require(
        sign != "~" or key.partition(".")[0] != "hydra",
        f"{word} would take out what Hydra needs itself: leave it out.",
    )
    if (key, value) == ("train", "false") and not sign and key not in groups:
        return ["trainer.max_epochs=0"]
    if key == "local" and not sign and "local" in groups:
        if value in NOTHING:
            return ["~local"]
        check_local(value, groups["local"])
    if not choices:
        habit = key if key in HABITS else key.partition(".")[0]
        way = HABITS.get(habit, "")
        if habit == "ckpt" and "checkpoint" in groups:  # of a script that opens a run
            way = "a run has checkpoint=best and checkpoint=last"
        if key == "ckpt_path" and "checkpoint" in groups:
            way = f"the checkpoint of a run is run={value}"
        require(not way or habit in groups, f"{word}: unknown key; {way.rstrip('.')}.")
        ours = "a run has a directory of its own below paths.log_dir=..., under name=..."
        require(key not in UNUSED, f"{word} would change nothing: {ours}")
        added = sign.startswith("+") and key.count(".") == 1 and key.startswith("hydra.")
        require(
            not (key in FILLED or (added and key.removeprefix("hydra.") not in HYDRAS)),
            f"{word} would change nothing: Hydra reads no such key from a command; leave it out.",
        )
        chosen = key.removeprefix("hydra.") if sign != "~" and value[:1] not in ("{", "$") else ""
        require(
            not (key.startswith("hydra.") and chosen in HYDRAS),
            f"{word} would choose nothing: write hydra/{chosen}={value or '...'}, or leave it out.",
        )
        if key == "data.augment" and WHOLE_NODE.match(value) and not FIELDS.match(value):
            return [f"{sign}{key}=[{value}]"]  # one transform, in the place of the fields
        return [earlier(word)]
    if "none" in choices and ((sign == "~" and not value) or (not sign and "=" in word and value in NOTHING)):
        return [f"{key}=none"]
    several = top_level(value)  # of a sweep
    if "none" in choices and not sign and len(several) > 1 and set(several) & set(NOTHING):
        return [f"{key}={','.join('none' if one in NOTHING else one for one in several)}"]
    if not sign and value in ("", "[]") and "=" in word and key not in OVER:
        raise UserError(f"{word}: expected a choice; choose one of {', '.join(choices)}")
    check_choice(word, key, value, groups)
    if key not in SEVERAL and WHOLE_NODE.match(value):  # Hydra would mix it with the keys of the file it replaces
        return [f"~{key}", f"+{key}={value}"]
    if sign.startswith("+"):
        add = (
            f"{key}=[default,{value}] to add to them"
            if "default" in choices
            else f"{key}={value}, or {key}=[...] for several"
        )
        require(key not in SEVERAL, f"{word} would take the place of the parts that are there: write {add}.")
        return [f"{key}={value}"]
    if key in SEVERAL and not sign and "{" in value:
        return spread(word, key, value, choices)
    inside = top_level(value[1:-1]) if value.startswith("[") and value.endswith("]") else []
    odd = next((item for item in inside if item[0] in "[{" or SCALAR.fullmatch(item.lstrip("-"))), "")
    if odd and odd not in choices:
        raise UserError(no_such_choice(key, odd, choices, groups))
    if not sign and SCALAR.fullmatch(value) and value not in choices:
        raise UserError(no_such_choice(key, value, choices, groups))
    return [word]


def _tell_repeated(overrides: Sequence[str]) -> None:
    last: dict[str, str] = {}
    for word in overrides:
        key = key_of(word)
        whole = word.startswith(f"+{key}=") and last.get(key) == f"~{key}"  # what a whole part is put in as
        if key in last and last[key] != word and not whole:
            print(f"{last[key]} is replaced by {word}, which was typed later.")
        last[key] = word


def _check_inside(overrides: Sequence[str]) -> None:
    """Hydra reads several values inside of one value, and does not know then what to do with them."""
    if not overrides:
        return
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep, Sweep
    from hydra.errors import HydraException

    def holds_several(value: Any) -> bool:
        inner = value.list if isinstance(value, ChoiceSweep) else value
        parts = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ()
        return any(isinstance(part, Sweep) or holds_several(part) for part in parts)

    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException:
        return  # Hydra tells it with its place
    word = next((item.input_line for item in parsed if holds_several(item._value)), None)
    require(
        word is None,
        f"{word}: choice, range and interval stand alone, not inside of a value: write all values by commas, as 1,2,3.",
    )


def _check_pattern(word: str, pattern: Any, choices: Sequence[str] | None) -> None:
    """A pattern that no choice has; of a group that is not known here, whoever composes knows the choices."""
    if choices is not None:
        listed = f"choose among {', '.join(choices)}" if choices else "write the values by commas"
        of = "no choice has that name" if choices else "a pattern is for the choices of a group, and that is a key"
        require(bool(pattern.filter(list(choices))), f"{word}: {of}, so the sweep has no job: {listed}.")


def _check_jobs(overrides: Sequence[str], groups: Groups) -> None:
    """Hydra runs a sweep over no values without a word."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Glob
    from hydra.errors import HydraException

    try:
        sweeps = [
            item for item in OverridesParser.create().parse_overrides(list(overrides)) if item.is_sweep_override()
        ]
    except HydraException:
        return  # Hydra tells it with its place
    for item in sweeps:
        check_swept(str(item.key_or_group), str(item.input_line))
        if isinstance(item.value(), Glob):
            _check_pattern(str(item.input_line), item.value(), groups.get(item.key_or_group))
        elif item.is_discrete_sweep():
            require(
                any(True for _ in item.sweep_iterator()),  # which may be null
                f"{item.input_line} has no values, so the sweep has no job: give "
                "values such as 1,2,3 or range(1,4), whose end does not count.",
            )


def no_such_choice(group: str, choice: str, options: Sequence[str], groups: Groups) -> str:
    """The sentence for a choice that a group does not have."""
    meant = MEANT.get(choice, choice)
    hint = f"did you mean {meant}?" if meant in options else did_you_mean(choice, options)
    if group == "strategy" and (typed := strategy_of(choice)):
        hint = f"write {typed}."
    others = [name for name, names in groups.items() if name != group and choice in names]
    others.sort(key=lambda name: name == "debug")  # whose choices stand for those of other groups
    if others and choice != "default" and not hint.startswith("did you mean"):
        hint = f"{choice} is one of {others[0]}: {others[0]}={choice}."
    return f"{group}={choice}: there is no such choice; {hint}"
