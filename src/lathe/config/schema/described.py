"""What the YAML files say of each key beside its value: the comment, the file, and the class that reads it."""

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lathe.config.schema.check import GLOBAL
from lathe.config.schema.names import canonical

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast
NOT_GROUPS = ("hydra", "local")  # Hydra's own keys, and files that no clone has


@dataclass(frozen=True)
class Written:
    """A key as a file writes it: `key` is its dotted path in a composed configuration, `owner` the canonical name of
    the class that stands beside it (else empty), `value` the text of its value (empty for a group of keys)."""

    file: str
    key: str
    value: str
    comment: str
    owner: str

    @property
    def name(self) -> str:
        """The last word of the key."""
        return self.key.rpartition(".")[2]


def files_of(folder: Path, names: Container[str]) -> list[Path]:
    """Return the files of the commands with these names, and of the groups that they choose from."""
    commands = [path for path in roots(folder) if path.stem in names]
    groups = headings(commands)
    return [*commands, *(path for path in sorted(folder.glob("*/*.yaml")) if path.parent.name in groups)]


def roots(folder: Path) -> list[Path]:
    """The files of commands, train.yaml first."""
    return sorted(folder.glob("*.yaml"), key=lambda path: (path.stem != "train", path))


def files_in(folder: Path) -> list[Path]:
    """All files in a folder of configurations: those at the root, then group by group."""
    return [*roots(folder), *sorted(folder.glob("*/*.yaml"))]


def written(folder: Path, files: list[Path] | None = None) -> list[Written]:
    """Every key of `files`, or of all files in a folder of configurations: those at the root, then group by group."""
    found: list[Written] = []
    for path in files or files_in(folder):
        group = path.parent.name if path.parent != folder else ""
        if group not in NOT_GROUPS:
            found += _keys_of(path, f"configs/{path.relative_to(folder).as_posix()}", group)
    return found


def _keys_of(path: Path, file: str, group: str) -> Iterator[Written]:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()

    def visit(node: yaml.MappingNode, prefix: str) -> Iterator[Written]:
        pairs = [(key.value, key, value) for key, value in node.value]
        owner = next((canonical(value.value) for name, _, value in pairs if name == "_target_"), "")
        for name, key, value in pairs:
            if name == "defaults" and node is root:
                continue
            below = isinstance(value, yaml.MappingNode) and bool(value.value)
            start, end = value.start_mark, value.end_mark
            one_line = start.line == end.line == key.start_mark.line
            text = "" if below else lines[start.line][start.column : end.column] if one_line else "[...]"
            yield Written(
                file, f"{prefix}{name}", text, _comment(lines, key, value if one_line and not below else key), owner
            )
            if below:
                yield from visit(value, f"{prefix}{name}.")
            for number, item in enumerate(value.value if isinstance(value, yaml.SequenceNode) else ()):
                if isinstance(item, yaml.MappingNode):
                    yield from visit(item, f"{prefix}{name}[{number}].")

    with path.open(encoding="utf-8") as stream:  # whose name an error in it gives
        root = yaml.compose(stream, Loader=_Loader)
    if isinstance(root, yaml.MappingNode):
        yield from visit(root, "" if not group or text.startswith(GLOBAL) else f"{group}.")


def _comment(lines: list[str], key: yaml.Node, last: yaml.Node) -> str:
    """The comment behind a key's value, or else the lines of comment right above the key."""
    behind = lines[last.end_mark.line][last.end_mark.column :].partition("#")[2].strip()
    if behind:
        return behind
    above: list[str] = []
    for line in reversed(lines[: key.start_mark.line]):
        if not line.strip().startswith("#") or line.startswith(GLOBAL):
            break
        above.insert(0, line.strip().lstrip("# "))
    return " ".join(above)


def choices(found: list[Written]) -> dict[str, dict[str, list[Written]]]:
    """The keys by group and file, such as ["optimizer"]["sgd"]; those of files at the root stand under the empty
    group.
    """
    table: dict[str, dict[str, list[Written]]] = {}
    for item in found:
        group, _, name = item.file.removeprefix("configs/").removesuffix(".yaml").rpartition("/")
        table.setdefault(group, {}).setdefault(name, []).append(item)
    return table


def comments(found: list[Written]) -> dict[tuple[str, str], str]:
    """The first comment on each argument by the class that takes it, and on each key without one by its dotted path:
    (owner, name).
    """
    said: dict[tuple[str, str], str] = {}
    for item in found:
        if item.comment:
            said.setdefault((item.owner, item.name) if item.owner else ("", item.key), item.comment)
    return said


def parts(found: list[Written]) -> dict[str, list[str]]:
    """The classes that the files build at each dotted path, such as model.net."""
    built: dict[str, list[str]] = {}
    for item in found:
        if item.name == "_target_":
            names = built.setdefault(item.key.rpartition(".")[0], [])
            names += [item.owner] if item.owner not in names else []
    return built


def headings(files: list[Path]) -> dict[str, str]:
    """The purpose of each group, from the lists of defaults in the files at the root."""
    said: dict[str, str] = {}
    for path in files:
        for group, comment in re.findall(
            r"^  - (?:optional )?(\w+): \S+ +# (.+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE
        ):
            said.setdefault(group, comment)
    return said


def plain(value: Any) -> str:
    """A value of a configuration as a file writes it, on one line."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("\n").removesuffix("\n...")
