"""Write docs/reference: a page for each group and its choices, from configs/schema.json and the YAML comments."""

import re
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from lathe.config.help_key import Entry, classes_by_key, comments, files_of, group_comments, read_entries
from lathe.config.schema import (
    BUILDER,
    GLOBAL,
    NOUNS,
    canonical,
    commands,
    component_keys,
    definitions,
    resolved,
    training_commands,
)
from lathe.config.values import NODE, NULL, Json, expected, kinds, shown

NOTE = "<!-- Written by `python scripts/schema.py` from signatures and the comments in configs/. -->"
# An example and the guide of each group.
GUIDES = {
    "data": ("data=cifar10 data.batch_size=256 data.augment.flip=none", "data.md"),
    "task": ("task.label_smoothing=0.1", "own_parts.md"),
    "model": ("model=resnet20 model.net.width=32", "own_parts.md"),
    "optimizer": ("optimizer=adamw optimizer.lr=3e-4", "optimizers.md"),
    "scheduler": ("scheduler=cosine scheduler.warmup=0.1", "optimizers.md"),
    "trainer": ("trainer.max_epochs=40 trainer.devices=2", "running.md"),
    "strategy": ("strategy=fsdp trainer.devices=2", "strategies.md"),
    "precision": ("precision=bf16-mixed", "speed.md"),
    "compile": ("compile=default compile.regional=true", "speed.md"),
    "compression": ("'compression=[distill,prune]' compression.prune.sparsity=0.9", "compression.md"),
    "callbacks": ("'callbacks=[default,ema]' callbacks.ema.decay=0.99", "monitoring.md"),
    "logger": ("'logger=[tensorboard,wandb]'", "monitoring.md"),
    "launch": ("launch.threads=2 trainer.devices=2", "launching.md"),
    "sweep": ("-m sweep=seeds model=mlp,resnet20", "sweeps.md"),
    "target": ("'target=[onnx,aot_inductor]' target.samples=200", "export.md"),
    "commands": ("seed=7 name=first", "runs.md"),
}


# Tools of maintainers: their keys without the meanings, which their YAML files have.
MAINTAINERS = ("gpu_check", "benchmark", "support")


@dataclass(frozen=True)
class Row:
    """A key as it is typed below its group or choice."""

    key: str
    takes: str
    default: str  # empty where no file sets it, or files differ
    meaning: str

    @property
    def typed(self) -> str:
        return f"`{self.key}={self.default}`" if self.default else f"`{self.key}`"

    @property
    def bare(self) -> "Row":
        """The key without its default, by which rows of several choices are compared."""
        return replace(self, default="")


@dataclass(frozen=True)
class Choice:
    """A file of a group or a command: what is typed, its name, its comment, its keys and classes."""

    title: str
    name: str
    text: str
    rows: list[Row]
    classes: list[str]


class Family:
    """Choices with the same keys, and each of these keys once."""

    def __init__(self, choices: list[Choice]) -> None:
        self.choices = choices
        self.names = ", ".join(f"`{choice.name}`" for choice in choices)
        self.rows: list[Row] = []
        for row in choices[0].rows:
            same = [other for choice in choices for other in choice.rows if other.key == row.key]
            meaning = max((other.meaning for other in same), key=len)
            default = row.default if len({other.default for other in same}) == 1 else ""
            self.rows.append(Row(row.key, row.takes, default, meaning))

    def section(self, shared: dict[Row, Row]) -> str:
        """Return the section: comments, the values that differ from those in the tables, its own keys."""
        first, *more = self.choices
        shown = {row.key: shared.get(row.bare, row).default for row in self.rows}
        lines = []
        for choice in self.choices:
            values = [row.typed for row in choice.rows if row.default and row.default != shown[row.key]]
            name = f"- `{choice.name}`: " if more else ""
            sets = f" Sets {', '.join(values)}." if values else ""
            text = _escaped(choice.text.removesuffix(".")) + "." * (choice.text[-1:] not in ("", ":"))
            lines.append(f"{name}{text}{sets}\n" if name or text or sets else "")
        title = ", ".join([f"`{first.title}`", *(f"`{choice.name}`" for choice in more)])
        built = "".join(f" (`{name}`)" for name in first.classes)
        own = [row for row in self.rows if row.bare not in shared]
        parts = [f"## {title}{built}", "".join(lines).strip(), _list(own)]
        return "\n\n".join(part for part in parts if part)


class Book:
    """The pages for a folder of configurations."""

    def __init__(self, folder: Path) -> None:
        files = files_of(folder, commands())
        self.folder, self.entries = folder, read_entries(folder, files)
        self.group_comments = group_comments([path for path in files if path.parent == folder])
        self.comments, self.built = comments(self.entries), classes_by_key(self.entries)

    def pages(self) -> dict[str, str]:
        """Return the text of each page by the name of its file."""
        names = [name.removesuffix("/*.yaml") for name in definitions() if name.endswith("/*.yaml")]
        names = [name for name in names if name not in ("paths", "hydra")]
        rows = "".join(f"- [{name}]({name}.md): {self.group_comments.get(name, '')}\n" for name in names)
        index = (
            f"# Every option\n\n{NOTE}\n\nA page for each group, a section for each choice. `key=value` is a key and "
            "its default; a key without a value is in no file: add it with a plus, as `+trainer.max_time=...`. "
            "`python train.py --help <key>` prints the same of one key, with its value in your composition.\n\n"
            f"{rows}- [commands](commands.md): the other keys of train.py and of each script\n"
        )
        return {
            **{f"{name}.md": self._group(name) for name in names},
            "commands.md": self._commands(),
            "README.md": index,
        }

    def _group(self, group: str) -> str:
        trees = _sections(resolved(definitions()[f"{group}/*.yaml"]))
        section = dict(pair for tree in trees for pair in _flat(tree, group))
        has_names = group in (*NOUNS, "target")  # their keys begin with the choice
        choices: list[Choice] = []
        for path in sorted((self.folder / group).glob("*.yaml")):
            prefix = f"{group}.{path.stem}." if has_names else f"{group}."
            of_file = [entry for entry in self.entries if entry.file == f"configs/{group}/{path.name}"]
            targets = [entry for entry in of_file if entry.name == "_target_" and component_keys(entry.owner)]
            rows = [row for entry in targets for row in self._component(entry, of_file, prefix)]
            keys = [key for key in section if key.startswith(prefix)] if has_names else []
            keys += [entry.key for entry in of_file if entry.key in section and entry.key not in keys]
            rows += [self._row(key, prefix, section[key], ("", key), of_file) for key in keys]
            classes = [entry.owner for entry in targets if entry.key == f"{prefix}_target_"]
            lines = takewhile(lambda line: line[:1] == "#", path.read_text(encoding="utf-8").splitlines())
            comment = " ".join(line.lstrip("# ") for line in lines if not line.startswith(GLOBAL))
            choices.append(Choice(f"{group}={path.stem}", path.stem, comment, rows, classes))
            section = {key: schema for key, schema in section.items() if not (has_names and key in keys)}
        seen = {f"{group}.{row.key}" for choice in choices for row in choice.rows}
        rest = {key: schema for key, schema in section.items() if key not in seen}
        start = "" if has_names else f"{group}."
        common = [self._row(key, start, schema, ("", key), self.entries) for key, schema in rest.items()]
        text = self.group_comments.get(group, "")
        intro = f"{text[:1].upper()}{text[1:]}. Keys begin with `{group}.{'<choice>.' * has_names}`."
        return _page(group, intro, common, choices + self._from_elsewhere(group))

    def _from_elsewhere(self, group: str) -> list[Choice]:
        """Return the components that only files of other groups choose, such as experiments."""
        choices: list[Choice] = []
        for key in (key for key in self.built if key.startswith(f"{group}.")):
            for name in self.built[key]:
                entries = [entry for entry in self.entries if entry.owner == name]
                if component_keys(name) and not any(entry.file.startswith(f"configs/{group}/") for entry in entries):
                    title = f"{key.partition('[')[0]}=[{{_target_: {name}}}]" if "[" in key else key
                    target = next(entry for entry in entries if entry.name == "_target_")
                    prefix = target.key.removesuffix("_target_")
                    rows = self._component(target, [entry for entry in entries if entry.key.startswith(prefix)], prefix)
                    choices.append(Choice(title, title, "", rows, [] if "[" in key else [name]))
        return choices

    def _component(self, target: Entry, entries: list[Entry], prefix: str) -> list[Row]:
        """Return the keys of a component that a file builds; those of components inside it are separate."""
        path, name = target.key.removesuffix("_target_"), target.owner
        schemas = dict(component_keys(name) or {})
        if name == BUILDER:
            kind = next(canonical(entry.value) for entry in entries if entry.key == "optimizer.kind.path")
            own = definitions()[name]["own"]
            schemas = {key: schema for key, schema in schemas.items() if key in own} | {
                key: schema for key, schema in (component_keys(kind) or {}).items() if key not in own
            }
        inside = {entry.key.removesuffix("._target_") for entry in entries if entry.name == "_target_"}
        rows = [(f"{path}{key}", schema) for key, schema in schemas.items() if f"{path}{key}" not in inside]
        return [self._row(key, prefix, schema, (name, key.removeprefix(path)), entries) for key, schema in rows]

    def _row(self, key: str, prefix: str, schema: Json, owner: tuple[str, str], entries: list[Entry]) -> Row:
        same = [entry for entry in entries if entry.key == key]
        values = list(dict.fromkeys(entry.value for entry in same))
        default = values[0] if len(values) == 1 else ""
        default = re.sub(r"(?<=[,:\[{]) ", "", default) if default[:1] == "[" else default
        default = default if len(default) <= 60 else "[...]"
        meaning = next((entry.comment for entry in same if entry.comment), self.comments.get(owner, ""))
        return Row(key.removeprefix(prefix), _takes(schema, default, meaning), default, meaning)

    def _commands(self) -> str:
        choices: list[Choice] = []
        train = definitions()["train.yaml"]["properties"]
        for command in commands():
            script = "train.py" if command == "train" else f"scripts/{command}.py"
            section, text = definitions()[f"{command}.yaml"], ""
            if command in training_commands() and command != "train":
                own = {key: schema for key, schema in section["properties"].items() if key not in train}
                section, text = {**section, "properties": own}, "Every key of train.py, and:"
            entries = [entry for entry in self.entries if entry.file == f"configs/{command}.yaml"]
            rows = [self._row(key, "", schema, ("", key), entries) for key, schema in _flat(section, "")]
            if command in MAINTAINERS:
                file = f"[configs/{command}.yaml](../../configs/{command}.yaml)"
                text = f"Meanings are in {file}. Keys: {', '.join(row.typed for row in rows)}"
                rows = []
            choices.append(Choice(script, command, text, rows, []))
        return _page("commands", "These keys come in addition to the [groups](README.md) of `--help`.", [], choices)


def _page(name: str, intro: str, common: list[Row], choices: list[Choice]) -> str:
    """Return a page, with each key that several choices have once, before the sections of the choices."""
    example, guide = GUIDES[name]
    script = "scripts/export.py run=logs/latest" if name == "target" else "train.py"
    text = f"# {name}\n\n{NOTE}\n\n{intro} Guide: [{guide}](../{guide}).\n\n"
    text += f"```bash\npython {script} {example}\n```\n\n{_list(common)}"
    without = [choice for choice in choices if not choice.rows]
    text += "".join(f"- `{choice.title}`: {_escaped(choice.text)}\n" for choice in without) + "\n" * bool(without)
    members: dict[object, list[Choice]] = {}  # choices with the same keys of the same classes
    for choice in choices:
        is_command = "=" not in choice.title
        same = choice.title if is_command else (frozenset(row.key for row in choice.rows), *choice.classes)
        members.setdefault(same, []).extend([choice] if choice.rows else [])
    families = [Family(same_keys) for same_keys in members.values() if same_keys]
    defaults: dict[Row, dict[str, str]] = {}  # of each key: by the names of the family
    for family in families:
        for row in family.rows:
            defaults.setdefault(row.bare, {})[family.names] = row.default
    tables: dict[str, list[Row]] = {}
    for row, by_names in defaults.items():
        if len(by_names) > 1:
            default = "" if len(set(by_names.values())) > 1 else next(iter(by_names.values()))
            names = ", ".join(by_names)
            others = ", ".join(family.names for family in families if family.names not in by_names)
            names = min(names, f"all but {others}", key=len) if others else "all choices"
            tables.setdefault(names, []).append(replace(row, default=default))
    for names, rows in tables.items():
        text += f"## Keys of {names}\n\n{_list(rows)}" if len(rows) > 2 else ""
    small = [(names, row) for names, rows in tables.items() if len(rows) < 3 for row in rows]
    rest = [replace(row, meaning=f"{row.meaning} (of {names})".strip()) for names, row in small]
    text += f"## Other keys of several choices\n\n{_list(rest)}" if rest else ""
    shared = {row.bare: row for rows in tables.values() for row in rows}
    return (text + "".join(family.section(shared) for family in families)).rstrip() + "\n"


def _flat(section: Json, prefix: str) -> list[tuple[str, Json]]:
    """Return the dotted keys of a section that are no components and in no other group."""
    keys: list[tuple[str, Json]] = []
    for name, definition in section["properties"].items():
        schema, key = resolved(definition), f"{prefix}.{name}" if prefix else name
        if name in ("defaults", "hydra") or NODE in (kinds(schema) if schema else ()):
            continue
        sections = _sections(schema)
        if not sections:
            keys.append((key, schema))
        elif "/*.yaml" not in str(definition.get("$ref", "")).replace("~1", "/") and key not in ("precision", "target"):
            keys += _flat(sections[0], key)
    return keys


def _sections(schema: Json) -> list[Json]:
    return [kind for kind in kinds(schema) if "properties" in kind] if schema else []


def _takes(schema: Json, default: str, meaning: str) -> str:
    """Describe the values that fit, without what the default and the meaning show."""
    phrases: dict[str, None] = {}
    for kind in kinds(schema) if schema else []:
        constants = [shown(word) for word in kind.get("enum", ()) if shown(word) != default]
        if kind == NULL and (default == "null" or "null" in meaning):
            continue
        if kind.get("type") == "boolean" and default in ("true", "false"):
            continue
        if "description" in kind and meaning and len(kind["description"].split()) > 4:
            continue
        if "enum" in kind and "description" not in kind:
            missing = (word for word in constants if not re.search(rf"\b{re.escape(word)}\b", meaning))
            phrases.update(dict.fromkeys(missing))
            continue
        phrases[_short(kind)] = None
    return ", ".join(phrases)


def _short(kind: Json) -> str:
    name = kind.get("type")
    if "description" in kind:
        return str(kind["description"])
    if name in ("integer", "number"):
        unit = "int" if name == "integer" else "x"
        low = f"{kind['minimum']:g}≤" if "minimum" in kind else ""
        low = f"{kind['exclusiveMinimum']:g}<" if "exclusiveMinimum" in kind else low
        high = f"≤{kind['maximum']:g}" if kind.get("maximum", 2**32) < 2**32 - 1 else ""
        high = f"<{kind['exclusiveMaximum']:g}" if "exclusiveMaximum" in kind else high
        if low and not high:
            return unit + {"≤": "≥", "<": ">"}[low[-1]] + low[:-1]
        return low + unit + high if low or high else "int" if name == "integer" else "number"
    if name == "array":
        each = _takes(kind.get("items", {}), "", "")
        return f"list of {each}" if each and each != "str" and "," not in each else "list"
    return {"string": "str", "boolean": "bool", "object": "mapping", "null": "null"}.get(str(name), expected(kind))


def _list(rows: list[Row]) -> str:
    """Return a list of keys, and a line with those about which only the class says more."""
    known = [row for row in rows if row.default or row.meaning]
    more = [f"`{row.key}`" + (f" ({row.takes})" if row.takes else "") for row in rows if row not in known]
    lines = []
    for row in known:
        takes = f" ({_escaped(row.takes)})" if row.takes else ""
        lines.append(f"- {row.typed}{takes}{': ' if row.meaning else ''}{_escaped(row.meaning)}\n")
    lines += [f"- In no file: {_escaped(', '.join(more))}\n"] if more else []
    return "".join(lines) + ("\n" if lines else "")


def _escaped(text: str) -> str:
    """Escape the characters that Markdown takes for HTML or emphasis."""
    return re.sub(r"`[^`]*`|[<*]", lambda found: {"<": "&lt;", "*": "\\*"}.get(found[0], found[0]), text)
