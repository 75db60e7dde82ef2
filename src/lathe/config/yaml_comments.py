"""The keys of the YAML files in configs/: their values, comments and the classes that take them."""

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lathe.config.schema import GLOBAL, canonical

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast
NOT_GROUPS = ("hydra", "local")  # Hydra's own keys, and files that no clone has


@dataclass(frozen=True)
class Entry:
    """A key of a file.

    `key` is its dotted path in a composed configuration, `owner` the canonical name of the class that takes it (else
    empty), `value` the text of its value (empty for a group of keys).
    """

    file: str
    key: str
    value: str
    comment: str
    owner: str

    @property
    def name(self) -> str:
        """The last word of the key."""
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
    found: dict[tuple[str, str], str] = {}
    for entry in entries:
        if entry.comment:
            found.setdefault((entry.owner, entry.name) if entry.owner else ("", entry.key), entry.comment)
    return found


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
    found: dict[str, str] = {}
    for path in files:
        text = path.read_text(encoding="utf-8")
        for group, comment in re.findall(r"^  - (?:optional )?(\w+): \S+ +# (.+)", text, flags=re.MULTILINE):
            found.setdefault(group, comment)
    return found


def one_line(value: Any) -> str:
    """Return a value as a file writes it, on one line."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("\n").removesuffix("\n...")
