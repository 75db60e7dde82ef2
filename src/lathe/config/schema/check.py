"""A resolved configuration held against the tables: by the verb's own keys, and in each part by what its `_target_`
takes.

Classes that no table knows are left to their own constructors.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lathe.config.schema.callbacks import CALLBACKS
from lathe.config.schema.compression import COMPRESSION
from lathe.config.schema.data import DATA
from lathe.config.schema.loggers import LOGGERS
from lathe.config.schema.models import MODELS
from lathe.config.schema.names import canonical
from lathe.config.schema.optim import OPTIMIZER, OPTIMIZERS, PLAN, PLATEAU, SCHEDULERS
from lathe.config.schema.places import Keys, Part, Parts, Place
from lathe.config.schema.rule import Rule, flag, path, shown, text, word
from lathe.config.schema.strategies import STRATEGIES
from lathe.config.schema.targets import own_targets
from lathe.config.schema.trainer import FILLED_IN, TRAINER
from lathe.config.schema.verbs import TRAIN, VERBS
from lathe.errors import did_you_mean

CLASSES: dict[str, dict[str, Rule]] = {
    "lightning.Trainer": TRAINER,
    "lathe.optim.build_optimizer": OPTIMIZER,
    "hydra.utils.get_class": {"path": text("the dotted path of a class", r"\w+(\.\w+)+")},
    **CALLBACKS,
    **COMPRESSION,
    **DATA,
    **LOGGERS,
    **MODELS,
    **SCHEDULERS,
    **STRATEGIES,
}
_TARGET = text("the dotted path of a class or function", r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_BUILDER = "lathe.optim.build_optimizer"  # hands what it does not take to the class at `kind`, but for what is null
# groups whose files set keys of the whole
WHOLE, GLOBAL = ("experiment", "debug", "performance"), "# @package _global_"
_NONE: dict[str, Rule] = {}
_HYDRA: dict[str, Rule] = {"_recursive_": flag, "_convert_": word("none", "partial", "object", "all")}


def takes(part: Mapping[str, Any]) -> dict[str, Rule] | None:
    """What the class of a part takes, by argument; None where no table knows it."""
    name = canonical(str(part["_target_"]))
    if name == _BUILDER:
        options = OPTIMIZERS.get(canonical(_kind(part)))
        return None if options is None else OPTIMIZER | {key: rule | None for key, rule in options.items()}
    if name in OPTIMIZERS:  # the class itself, as Lightning users write it
        return {key: rule for key, rule in OPTIMIZER.items() if key != "kind"} | {
            key: rule | None for key, rule in OPTIMIZERS[name].items()
        }
    return PLATEAU if name == "torch.optim.ReduceLROnPlateau" else CLASSES.get(name)


def _kind(part: Mapping[str, Any]) -> str:
    """The dotted path of an optimizer's class, empty where there is none."""
    kind = part.get("kind")
    return str(kind.get("path")) if isinstance(kind, Mapping) else ""


def places_of(verb: str, cfg: Mapping[str, Any]) -> Mapping[str, Place]:
    """The keys of a command. The user's own has those of train.py if it has all of them; else its keys are free but for
    those that the launch reads."""
    if verb in VERBS:
        return VERBS[verb]
    return (
        TRAIN
        if TRAIN.keys() <= cfg.keys()
        else {key: TRAIN[key] for key in ("launch", "strategy", "trusted") if key in cfg}
    )


Problem = tuple[str, str]  # a key, and the sentence that says what is wrong there


def problems(
    cfg: Mapping[str, Any], verb: str, read: Collection[str] | None = None, saved: bool = False
) -> Iterator[Problem]:
    """Each key of a verb's resolved configuration whose value nothing takes, or that nothing reads, with the sentence
    that says so.

    `read` are keys at the root that others interpolate; None where that is not known. A `saved` configuration, which an
    older version may have written, may lack keys.
    """
    tree = places_of(verb, cfg)
    for key, value in cfg.items():
        if key in tree:
            yield from _place(tree[key], key, value, saved)
        elif key in WHOLE:
            yield key, f"{key}: the file that was chosen sets no key of the run; it begins with the line `{GLOBAL}`."
        elif verb in VERBS and read is not None and key not in read:
            yield key, f"{key}: there is no such key, and nothing reads it; {did_you_mean(key, tree)}"
    for key, place in tree.items():
        if key not in cfg and not saved and not _may_be_absent(place):
            yield key, f"{key} is missing: leave ~{key} out."


def rules(cfg: Mapping[str, Any], verb: str) -> dict[str, Rule]:
    """The rule of each key that stands in a verb's resolved configuration and that a table knows, by dotted path."""
    found: dict[str, Rule] = {}

    def visit(place: Place, key: str, value: Any) -> None:
        if isinstance(place, Rule):
            found[key] = place
        if not isinstance(value, Mapping):
            return
        for name, item in value.items():
            inner: Place | None = None
            if isinstance(place, Keys):
                inner = place.keys.get(name)
            elif isinstance(place, Parts):
                inner = place.settings.get(name, Part())
            elif "_target_" in value:
                inner = _TARGET if name == "_target_" else (takes(value) or {}).get(name) or _HYDRA.get(name)
            if inner is not None:
                visit(inner, f"{key}.{name}", item)
            elif isinstance(item, Mapping) and "_target_" in item:
                visit(Part(), f"{key}.{name}", item)

    tree = places_of(verb, cfg)
    for key, value in cfg.items():
        if key in tree:
            visit(tree[key], key, value)
    return found


def _may_be_absent(place: Place) -> bool:
    """Hydra leaves out a group whose choice is null."""
    return isinstance(place, (Keys, Part)) and place.null


def _place(place: Place, key: str, value: Any, saved: bool) -> Iterator[Problem]:
    if isinstance(place, Rule):
        sentence = (place | path if saved and key == "paths.run_dir" else place).sentence(key, value)
        if sentence is not None:
            yield key, sentence
    elif value is None and (isinstance(place, Parts) or place.null):
        return
    elif not isinstance(value, Mapping):
        way = f"choose one of the files in configs/{key}"
        if "." in key:
            node = "{_target_: your.module.Class, ...}"
            way = f"write {key}={node}" if isinstance(place, (Part, Parts)) else "write {key: value, ...}"
        yield key, f"{key}={shown(value)}: expected a group of keys; {way}."
    elif isinstance(place, Keys):
        yield from _keys(place, key, value, saved)
    elif isinstance(place, Part) and place.empty and not value:
        return
    elif isinstance(place, Part):
        yield from _part(key, value, PLAN if key == "scheduler" else {})
        if not saved:
            yield from _missing(key, [name for name in place.needs if name not in value])
    else:
        for name, node in value.items():
            below = f"{key}.{name}"
            if name in place.settings:
                yield from _place(place.settings[name], below, node, saved)
            elif isinstance(node, Mapping) and "_target_" not in node:
                add = f"add {name} to {key}, or set {below}=null."
                yield below, f"{below} sets options of a {place.noun} that the run does not have: {add}"
            elif isinstance(node, Mapping):
                yield from _place(Part(), below, node, saved)
            elif node is not None:
                such = f"a {place.noun} has a name of its own, and its keys stand below that"
                yield below, f"{below}={shown(node)}: {such}: {key}.<name>.{name}."


def _keys(place: Keys, key: str, value: Mapping[str, Any], saved: bool) -> Iterator[Problem]:
    for name, item in value.items():
        below = f"{key}.{name}"
        if name in place.keys:
            yield from _place(place.keys[name], below, item, saved)
        elif key != "target" or name not in own_targets():
            way = f"there is no such key in {key}; {did_you_mean(name, place.keys)}"
            yield below, _filled_in(below, item) or f"{below}: {way}"
    if not saved:
        yield from _missing(key, [name for name in place.keys if name not in value and name not in place.optional])


def _missing(key: str, names: list[str]) -> Iterator[Problem]:
    for name in names:
        yield f"{key}.{name}", f"{key}.{name} is missing: leave ~{key}.{name} out."


def _filled_in(key: str, value: Any) -> str | None:
    """The sentence for an argument of Lightning's Trainer that another group gives."""
    group, _, name = key.partition(".")
    given = group == "trainer" and name in FILLED_IN
    return f"{key}={shown(value)} is not taken from here: {FILLED_IN[name]}." if given else None


def _choose(key: str, part: Mapping[str, Any]) -> str:
    """Where a part that has no _target_ finds one, and where the keys that it has may belong in place of that."""
    names = " and ".join(f"model.net.{name}" for name in part)
    own = f"; with model=lightning it is the module's own: {names}" if key == "optimizer" and names else ""
    return f"choose one of the files in configs/{key.split('.')[0]}{own}"


def _part(key: str, part: Mapping[str, Any], beside: Mapping[str, Rule] = _NONE) -> Iterator[Problem]:
    """What is wrong with a part and with the parts inside it; `beside` are keys that the part itself does not take."""
    inner = part.get(key)
    if beside and "_target_" not in part and isinstance(inner, Mapping):  # as Lightning writes a scheduler
        yield from _keys(Keys({key: Part(), **beside}, tuple(beside)), key, part, False)
        return
    if "_target_" not in part:
        yield key, f"{key} has no _target_: leave ~{key}._target_ out, or {_choose(key, part)}."
        return
    target = part["_target_"]
    sentence = _TARGET.sentence(f"{key}._target_", target)
    if sentence is not None:
        yield f"{key}._target_", sentence
        return
    rules = takes(part)
    for name, value in part.items():
        below = f"{key}.{name}"
        if name == "_target_":
            continue
        rule = (rules or {}).get(name) or _HYDRA.get(name) or beside.get(name)
        if rule is not None:
            found = rule.sentence(below, value)
            if found is not None:
                yield below, found
                continue
        elif rules is not None and not (name in ("_partial_", "_args_") and not value):
            hint = did_you_mean(name, rules)
            if canonical(target) != _BUILDER:
                yield below, _filled_in(below, value) or f"{below}: {target} takes no such argument; {hint}"
            elif value is not None:
                yield below, f"{below}: {_kind(part)} takes no such option; leave it out with {below}=null; {hint}"
            continue
        yield from _inside(below, value)


def _inside(key: str, value: Any) -> Iterator[Problem]:
    """What is wrong with a part at `key`, or with those in a list or a group of them."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _inside(f"{key}[{number}]", item)
    elif isinstance(value, Mapping) and "_target_" in value:
        yield from _part(key, value)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _inside(f"{key}.{name}", item)


def follows(raw: Any, key: str = "") -> dict[str, set[str]]:
    """The keys that each leaf of an unresolved configuration interpolates, by dotted path; those that interpolate none
    are left out.
    """
    if isinstance(raw, (Mapping, list)):
        pairs = raw.items() if isinstance(raw, Mapping) else ((key, item) for item in raw)
        below = [(f"{key}.{name}" if key and isinstance(raw, Mapping) else str(name), item) for name, item in pairs]
        found: dict[str, set[str]] = {}
        for name, item in below:
            for leaf, names in follows(item, name).items():
                found.setdefault(leaf, set()).update(names)
        return found
    inner = re.findall(r"\$\{([^}]*)\}", raw) if isinstance(raw, str) else []
    return {key: {name for text in inner for name in re.findall(r"\w+(?:\.\w+)*", text)}} if inner else {}
