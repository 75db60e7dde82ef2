"""The pages of docs/reference: every key by group and component, with what it takes, its value in the files and its
comment, from configs/schema.json.
"""

import itertools
import re
from pathlib import Path

from lathe.config.schema.check import (
    BUILDER,
    GLOBAL,
    NOUNS,
    commands,
    component_keys,
    definitions,
    resolved,
    training_commands,
)
from lathe.config.schema.described import Written, comments, files_of, headings, parts, written
from lathe.config.schema.names import canonical
from lathe.config.values import NODE, Json, expected, kinds

NOTE = "<!-- Written by `python scripts/schema.py` from signatures and the comments in configs/. -->"


class Book:
    """Everything that configs/schema.json and the files in `folder` say of each key."""

    def __init__(self, folder: Path) -> None:
        files = files_of(folder, commands())
        self.folder, self.found = folder, written(folder, files)
        self.headings = headings([path for path in files if path.parent == folder])
        self.said, self.built = comments(self.found), parts(self.found)

    def pages(self) -> dict[str, str]:
        """The text of each page by the name of its file."""
        names = [name.removesuffix("/*.yaml") for name in definitions() if name.endswith("/*.yaml")]
        names = [name for name in names if name not in ("paths", "hydra")]
        pages = {f"{name}.md": self._group(name) for name in names}
        pages["commands.md"] = self._commands()
        rows = "".join(f"- [{name}]({name}.md): {self.headings.get(name, '')}\n" for name in names)
        index = "- [commands](commands.md): what train.py and each script take beside the groups\n"
        pages["README.md"] = (
            f"# Every key\n\n{NOTE}\n\n`python train.py --help <key>` says the same of one key, with its value in your "
            f"composition. An argument without a value stands in no file: add it with a plus.\n\n{index}{rows}"
        )
        return pages

    def _group(self, group: str) -> str:
        files = "".join(
            f"- `{path.stem}`: {_escaped(_first_words(path))}\n"
            for path in sorted((self.folder / group).glob("*.yaml"))
        )
        title = self.headings.get(group, "")
        text = f"# {group}\n\n{NOTE}\n\n{title[:1].upper()}{title[1:]}.\n\n{files}\n"
        sections = _sections(resolved(definitions()[f"{group}/*.yaml"]))
        text += _table("".join(self._rows(group, section, "") for section in sections))
        below = [key for key in self.built if key == group or key.startswith(f"{group}.")]
        done: list[str] = []
        for key in below:
            for name in self.built[key]:
                if component_keys(name) and name not in done and name != "hydra.utils.get_class":
                    done.append(name)
                    text += f"## `{self._typed(name, key)}`\n\n`{name}`\n\n{self._class(name)}"
        return text.rstrip() + "\n"

    def _typed(self, name: str, key: str) -> str:
        """What is typed for a class that the files build at a key: a choice, the key, or an item of a list."""
        group = key.split(".")[0]
        if "[" in key:
            return f"{key.partition('[')[0]}=[{{_target_: {name}}}]"
        if group in NOUNS:
            return key
        choice = self._choosing(group, [item for item in self.found if item.owner == name])
        return choice if key in (group, "model.net") else f"{choice} {key}"

    def _choosing(self, group: str, items: list[Written]) -> str:
        """The choices of a group whose files have some of these keys, as they are typed."""
        names = dict.fromkeys(Path(item.file).stem for item in items if item.file.startswith(f"configs/{group}/"))
        return f"{group}={','.join(names)}"

    def _class(self, name: str) -> str:
        own = [item for item in self.found if item.owner == name]
        text = _table("".join(self._row(key, schema, (name, key), own) for key, schema in self._own_keys(name).items()))
        for kind, options in self._optimizers() if name == BUILDER else ():
            files = {
                item.file for item in self.found if item.key == "optimizer.kind.path" and canonical(item.value) == kind
            }
            named = [item for item in own if item.file in files] or [item for item in self.found if item.owner == kind]
            typed = self._choosing("optimizer", named) if named else f"optimizer.kind.path={kind}"
            text += f"### `{typed}`\n\n`{kind}`\n\n" + _table(
                "".join(self._row(key, schema, (name, key), named) for key, schema in options.items())
            )
        return text

    def _own_keys(self, name: str) -> dict[str, Json]:
        own = definitions()[name].get("own")
        return {key: schema for key, schema in (component_keys(name) or {}).items() if own is None or key in own}

    def _optimizers(self) -> list[tuple[str, dict[str, Json]]]:
        """Return the options of each optimizer that a file chooses, and of Lathe's own."""
        own = self._own_keys(BUILDER)
        chosen = [canonical(item.value) for item in self.found if item.key == "optimizer.kind.path"]
        names = [name for name in definitions() if name in chosen]
        keys = {name: component_keys(name) or {} for name in names}
        return [(name, {key: one for key, one in found.items() if key not in own}) for name, found in keys.items()]

    def _rows(self, prefix: str, section: Json, files: str) -> str:
        """Return a row for each key of a section, with what the files whose names begin with `files` say of it."""
        rows = ""
        for name, one in section["properties"].items():
            schema, key = resolved(one), f"{prefix}.{name}" if prefix else name
            if name in ("defaults", "hydra") or NODE in (kinds(schema) if schema else ()):
                continue
            own = [item for item in self.found if item.key == key and item.file.startswith(files)]
            sections = _sections(schema)
            if not sections:
                rows += self._row(key, schema, ("", key), own, key)
            elif "/*.yaml" not in str(one.get("$ref", "")).replace("~1", "/") and key not in ("precision", "target"):
                rows += self._rows(key, sections[0], files)
        return rows

    def _commands(self) -> str:
        text = (
            f"# Commands\n\n{NOTE}\n\nBeside the keys here they take those of the [groups](README.md) that `--help` "
            "lists.\n\n"
        )
        for command in commands():
            script = "train.py" if command == "train" else f"scripts/{command}.py"
            section = definitions()[f"{command}.yaml"]
            more = ""
            if command in training_commands() and command != "train":
                train = definitions()["train.yaml"]["properties"]
                own = {key: one for key, one in section["properties"].items() if key not in train}
                section, more = {**section, "properties": own}, "Every key of train.py, and:\n\n"
            rows = self._rows("", section, f"configs/{command}.yaml")
            if command == "train":
                methods = definitions()["compression/*.yaml"]["properties"]
                rows += self._rows("compression", {"properties": methods}, "")
            text += f"## {script}\n\n{more}{_table(rows)}"
        return text.rstrip() + "\n"

    def _row(self, name: str, schema: Json, owner: tuple[str, str], own: list[Written], key: str = "") -> str:
        same = [item for item in own if (item.key == key if key else item.name == name)]
        values = list(dict.fromkeys(item.value for item in same))
        value = "by file" if len(values) > 1 else f"`{values[0]}`" if values and values[0] else ""
        said = next((item.comment for item in same if item.comment), self.said.get(owner, ""))
        return f"| `{name}` | {_cell(expected(schema))} | {value} | {_cell(said)} |\n"


def _sections(schema: Json) -> list[Json]:
    return [kind for kind in kinds(schema) if "properties" in kind] if schema else []


def _first_words(path: Path) -> str:
    """The comment at the top of a file."""
    head = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return " ".join(line.lstrip("# ") for line in head if not line.startswith(GLOBAL))


def _table(rows: str) -> str:
    return f"| key | takes | value | meaning |\n|---|---|---|---|\n{rows}\n" if rows else ""


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Text in which Markdown reads no HTML and no emphasis."""
    return re.sub(r"`[^`]*`|[<*]", lambda found: {"<": "&lt;", "*": "\\*"}.get(found[0], found[0]), text)
