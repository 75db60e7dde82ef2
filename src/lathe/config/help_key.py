"""Print --help <key>: its value in this composition, the values it takes, its comment and its file.

The comments and values are read from the YAML files in configs/.
"""

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lathe.config.override_parsing import LISTS
from lathe.config.resolve import flatten
from lathe.config.schema import GLOBAL, canonical, key_schemas, takes
from lathe.config.values import Json, expected
from lathe.errors import UserError, did_you_mean

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast
NOT_GROUPS = ("hydra", "local")  # Hydra's own keys, and files that no clone has


@dataclass(frozen=True)
class Entry:
    """A key of a file: its dotted path in a composed configuration, the text of its value (empty for a group of keys),
    and as `owner` the canonical name of the class that takes it (else empty).
    """

    file: str
    key: str
    value: str
    comment: str
    owner: str

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


def command_files(folder: Path) -> list[Path]:
    """Return the files of commands, train.yaml first."""
    return sorted(folder.glob("*.yaml"), key=lambda path: (path.stem != "train", path))


def files_of(folder: Path, names: Container[str]) -> list[Path]:
    """Return the files of the commands with these names, and of the groups that they choose from."""
    commands = [path for path in command_files(folder) if path.stem in names]
    groups = group_comments(commands)
    return [*commands, *(path for path in sorted(folder.glob("*/*.yaml")) if path.parent.name in groups)]


def read_entries(folder: Path, files: list[Path] | None = None) -> list[Entry]:
    """Read every key of `files`, by default of all files in a folder of configurations."""
    entries: list[Entry] = []
    for path in files or [*command_files(folder), *sorted(folder.glob("*/*.yaml"))]:
        group = path.parent.name if path.parent != folder else ""
        if group not in NOT_GROUPS:
            entries += _entries_of(path, f"configs/{path.relative_to(folder).as_posix()}", group)
    return entries


def _entries_of(path: Path, file: str, group: str) -> Iterator[Entry]:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()

    def visit(node: yaml.MappingNode, prefix: str) -> Iterator[Entry]:
        owner = next((canonical(value.value) for key, value in node.value if key.value == "_target_"), "")
        for key, value in node.value:
            if key.value == "defaults" and node is root:
                continue
            is_group = isinstance(value, yaml.MappingNode) and bool(value.value)
            start, end = value.start_mark, value.end_mark
            is_one_line = start.line == end.line == key.start_mark.line
            shown = "" if is_group else lines[start.line][start.column : end.column] if is_one_line else "[...]"
            comment = _comment(lines, key, value if is_one_line and not is_group else key)
            yield Entry(file, f"{prefix}{key.value}", shown, comment, owner)
            if is_group:
                yield from visit(value, f"{prefix}{key.value}.")
            for number, item in enumerate(value.value if isinstance(value, yaml.SequenceNode) else ()):
                if isinstance(item, yaml.MappingNode):
                    yield from visit(item, f"{prefix}{key.value}[{number}].")

    with path.open(encoding="utf-8") as stream:  # an error names the stream's file
        root = yaml.compose(stream, Loader=_Loader)
    if isinstance(root, yaml.MappingNode):
        yield from visit(root, "" if not group or text.startswith(GLOBAL) else f"{group}.")


def _comment(lines: list[str], key: yaml.Node, last: yaml.Node) -> str:
    """Return the comment at the end of a key's line, or the lines of comment above it."""
    at_end = lines[last.end_mark.line][last.end_mark.column :].partition("#")[2].strip()
    if at_end:
        return at_end
    above: list[str] = []
    for line in reversed(lines[: key.start_mark.line]):
        if not line.strip().startswith("#") or line.startswith(GLOBAL):
            break
        above.insert(0, line.strip().lstrip("# "))
    return " ".join(above)


def comments(entries: list[Entry]) -> dict[tuple[str, str], str]:
    """Return the first comment on each key, by (class, argument), or ("", dotted path) where no class takes it."""
    texts: dict[tuple[str, str], str] = {}
    for entry in entries:
        if entry.comment:
            texts.setdefault((entry.owner, entry.name) if entry.owner else ("", entry.key), entry.comment)
    return texts


def classes_by_key(entries: list[Entry]) -> dict[str, list[str]]:
    """Return the classes that the files build at each dotted path, such as model.net."""
    built: dict[str, list[str]] = {}
    for entry in entries:
        if entry.name == "_target_":
            names = built.setdefault(entry.key.rpartition(".")[0], [])
            names += [entry.owner] if entry.owner not in names else []
    return built


def group_comments(files: list[Path]) -> dict[str, str]:
    """Return the comment on each group, from the defaults lists of the files of commands."""
    texts: dict[str, str] = {}
    for path in files:
        text = path.read_text(encoding="utf-8")
        for group, comment in re.findall(r"^  - (?:optional )?(\w+): \S+ +# (.+)", text, flags=re.MULTILINE):
            texts.setdefault(group, comment)
    return texts


def one_line(value: Any) -> str:
    """Return a value as a file writes it, on one line."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("\n").removesuffix("\n...")


class KeyHelp:
    """A composed configuration with the schemas and comments of its keys."""

    def __init__(self, folder: Path, verb: str, overrides: Sequence[str], entries: list[Entry] | None = None) -> None:
        with initialize_config_dir(str(folder), version_base="1.3"):
            self.cfg = compose(verb, overrides=list(overrides), return_hydra_config=True)
        self.folder, self.verb, self.overrides = folder, verb, overrides
        self.chosen: dict[str, Any] = dict(self.cfg.hydra.runtime.choices)
        tree: Any = OmegaConf.to_container(self.cfg, resolve=False)
        self.tree = {key: value for key, value in tree.items() if key != "hydra"}
        self.schemas: Mapping[str, Json] = key_schemas(self.tree, verb)
        self.entries = read_entries(folder) if entries is None else entries
        self.choices: dict[str, dict[str, list[Entry]]] = {}  # by group and name
        for entry in self.entries:
            group, _, name = entry.file.removeprefix("configs/").removesuffix(".yaml").rpartition("/")
            if group in self.chosen:
                self.choices.setdefault(group, {}).setdefault(name, []).append(entry)
        self.group_comments = group_comments(command_files(folder))
        own = [entry for entry in self.entries if entry.file == f"configs/{verb}.yaml"]
        self.comments = comments(own + self.entries)

    def explain(self, key: str) -> str:
        """Explain a key or a group of keys."""
        is_there, value = self._look_up(key)
        if isinstance(value, Mapping) and value and (key not in self.schemas or "_target_" in value):
            return self._explain_group(key, value)
        if is_there:
            return self._explain_value(key, value)
        above, _, name = key.rpartition(".")
        parent = self._look_up(above)[1]
        arguments = _arguments(parent)
        if name in arguments:
            owner = parent["_target_"]
            rows = {"takes": expected(arguments[name]), "means": self.comments.get((owner, name))}
            return f"{key} (an argument of {owner})\n{_table({**rows, 'in': f'no file: add it with +{key}=...'})}"
        if key in self.choices:
            return self._title(key)
        group = key.split(".")[0]
        for choice, entries in self.choices.get(group, {}).items():  # the first one that has the key
            if any(f"{key}.".startswith(f"{entry.key}.") and not self._look_up(entry.key)[0] for entry in entries):
                word = f"{group}=[{','.join([*LISTS[group], choice])}]" if group in LISTS else f"{group}={choice}"
                other = KeyHelp(self.folder, self.verb, [*self.overrides, word], self.entries)
                return f"{other.explain(key)}\n  with    {word}"
        keys = [*self.schemas, *self.tree, *self.choices, *(f"{above}.{option}" for option in arguments)]
        same = sorted((option for option in keys if option.endswith(f".{key}")), key=lambda option: option.count("."))
        hint = f"did you mean {same[0]}?" if same else did_you_mean(key, keys, "--help lists the groups")
        raise UserError(f"--help {key}: unknown key; {hint}")

    def _look_up(self, key: str) -> tuple[bool, Any]:
        value: Any = self.tree
        for name in key.split("."):
            if not isinstance(value, Mapping) or name not in value:
                return False, None
            value = value[name]
        return True, value

    def _explain_value(self, key: str, value: Any) -> str:
        schema, entry = self.schemas.get(key), self._entry(key, value)
        above, _, name = key.rpartition(".")
        parent = self._look_up(above)[1]
        owner = canonical(parent["_target_"]) if isinstance(parent, Mapping) and "_target_" in parent else ""
        comment = self.comments.get((owner, name) if owner else ("", key))
        if entry is not None and entry.comment and entry.owner in ("", owner):
            comment = entry.comment
        rows = {
            "takes": expected(schema) if schema is not None else None,
            "means": comment,
            "in": entry.file if entry is not None else None,
        }
        return f"{key}={self._value_text(key, value)}\n{_table(rows)}"

    def _value_text(self, key: str, value: Any) -> str:
        if not isinstance(value, str) or "${" not in value:
            return "???, which has to be given" if value == "???" else one_line(value)
        try:
            return f"{one_line(OmegaConf.select(self.cfg, key))}, as it follows {value}"
        except OmegaConfBaseException:
            return value

    def _entry(self, key: str, value: Any) -> Entry | None:
        """Return the entry that sets a key: of this composition's files, else one with this value, else any."""
        files = [f"configs/{self.verb}.yaml"]
        for group, names in self.chosen.items():
            files += [f"configs/{group}/{name}.yaml" for name in ([names] if isinstance(names, str) else names or ())]
        own = [entry for entry in self.entries if entry.key == key]
        own.sort(key=lambda entry: (entry.file not in files, entry.value != one_line(value)))
        return own[0] if own else None

    def _title(self, group: str) -> str:
        rows = {"choices": ", ".join(self.choices[group]), "chosen": one_line(self.chosen.get(group))}
        return f"{group}: {self.group_comments.get(group, 'a group of keys')}\n{_table(rows)}"

    def _explain_group(self, key: str, value: Mapping[str, Any]) -> str:
        rows = [
            (name, self._value_text(name, item), self.schemas.get(name)) for name, item in flatten(value, key).items()
        ]
        width, values = max(len(name) for name, *_ in rows), min(28, max(len(text) for _, text, _ in rows))
        entry = self._entry(key, value)
        file = None if entry is None else entry.file
        in_file = {sibling.key: sibling.comment for sibling in self.entries if sibling.file == file}
        lines = []
        for name, text, schema in rows:
            note = f"  # {in_file[name]}" if key not in self.choices and in_file.get(name) else ""
            lines.append(f"  {name:{width}}  {text:{values}}  {expected(schema) if schema else ''}{note}".rstrip())
        more = [f"+{key}.{name}" for name in _arguments(value) if name not in value]
        title = self._title(key) if key in self.choices else f"{key}: {in_file.get(key) or 'a group of keys'}"
        return f"{title}\n\n" + "\n".join(lines) + (f"\n\n  with a plus: {', '.join(more)}" if more else "")


def _arguments(node: Any) -> dict[str, Json]:
    """Return the schemas of the arguments of a node's class, if it is in the schema."""
    return (takes(node) or {}) if isinstance(node, Mapping) and isinstance(node.get("_target_"), str) else {}


def _table(rows: Mapping[str, str | None]) -> str:
    return "\n".join(f"  {name:8}{text}" for name, text in rows.items() if text)
