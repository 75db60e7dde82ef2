"""Write docs/reference: every key by group and component, from configs/schema.json and the YAML comments."""

import itertools
import re
from pathlib import Path

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
from lathe.config.values import NODE, Json, expected, kinds
from lathe.config.yaml_comments import Entry, classes_by_key, comments, files_of, group_comments, read_entries

NOTE = "<!-- Written by `python scripts/schema.py` from signatures and the comments in configs/. -->"


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
            f"# Every key\n\n{NOTE}\n\n`python train.py --help <key>` says the same of one key, with its value in your "
            "composition. An argument without a value is in no file: add it with a plus.\n\n"
            f"- [commands](commands.md): the keys of train.py and each script that are in no group\n{rows}"
        )
        groups = {f"{name}.md": self._group(name) for name in names}
        return {**groups, "commands.md": self._commands(), "README.md": index}

    def _group(self, group: str) -> str:
        files = "".join(
            f"- `{path.stem}`: {_escaped(_first_comment(path))}\n"
            for path in sorted((self.folder / group).glob("*.yaml"))
        )
        title = self.group_comments.get(group, "")
        text = f"# {group}\n\n{NOTE}\n\n{title[:1].upper()}{title[1:]}.\n\n{files}\n"
        sections = _sections(resolved(definitions()[f"{group}/*.yaml"]))
        text += _table("".join(self._rows(group, section, "") for section in sections))
        done: list[str] = []
        for key in [key for key in self.built if f"{key}.".startswith(f"{group}.")]:
            for name in self.built[key]:
                if component_keys(name) and name not in done and name != "hydra.utils.get_class":
                    done.append(name)
                    text += f"## `{self._override(name, key)}`\n\n`{name}`\n\n{self._component(name)}"
        return text.rstrip() + "\n"

    def _override(self, name: str, key: str) -> str:
        """Return the override that builds a class at a key: a choice, the key, or an item of a list."""
        group = key.split(".")[0]
        if "[" in key:
            return f"{key.partition('[')[0]}=[{{_target_: {name}}}]"
        if group in NOUNS:
            return key
        choice = self._choice(group, [entry for entry in self.entries if entry.owner == name])
        return choice if key in (group, "model.net") else f"{choice} {key}"

    def _choice(self, group: str, entries: list[Entry]) -> str:
        """Return the override for the files of a group that have some of these keys."""
        files = dict.fromkeys(Path(one.file).stem for one in entries if one.file.startswith(f"configs/{group}/"))
        return f"{group}={','.join(files)}"

    def _component(self, name: str) -> str:
        own = [entry for entry in self.entries if entry.owner == name]
        keys = self._own_keys(name)
        text = _table("".join(self._row(key, schema, (name, key), own) for key, schema in keys.items()))
        for kind, options in self._optimizers() if name == BUILDER else ():
            of_kind = [one for one in self.entries if one.key == "optimizer.kind.path" and canonical(one.value) == kind]
            files = {entry.file for entry in of_kind}
            entries = [one for one in own if one.file in files] or [one for one in self.entries if one.owner == kind]
            override = self._choice("optimizer", entries) if entries else f"optimizer.kind.path={kind}"
            rows = "".join(self._row(key, schema, (name, key), entries) for key, schema in options.items())
            text += f"### `{override}`\n\n`{kind}`\n\n" + _table(rows)
        return text

    def _own_keys(self, name: str) -> dict[str, Json]:
        own = definitions()[name].get("own")
        return {key: schema for key, schema in (component_keys(name) or {}).items() if own is None or key in own}

    def _optimizers(self) -> list[tuple[str, dict[str, Json]]]:
        """Return the options of each optimizer that a file chooses."""
        own = self._own_keys(BUILDER)
        chosen = [canonical(entry.value) for entry in self.entries if entry.key == "optimizer.kind.path"]
        options = {name: component_keys(name) or {} for name in definitions() if name in chosen}
        return [(name, {key: one for key, one in keys.items() if key not in own}) for name, keys in options.items()]

    def _rows(self, prefix: str, section: Json, files: str) -> str:
        """Return a row for each key of a section, with values and comments of the files that begin with `files`."""
        rows = ""
        for name, one in section["properties"].items():
            schema, key = resolved(one), f"{prefix}.{name}" if prefix else name
            if name in ("defaults", "hydra") or NODE in (kinds(schema) if schema else ()):
                continue
            entries = [entry for entry in self.entries if entry.key == key and entry.file.startswith(files)]
            sections = _sections(schema)
            if not sections:
                rows += self._row(key, schema, ("", key), entries)
            elif "/*.yaml" not in str(one.get("$ref", "")).replace("~1", "/") and key not in ("precision", "target"):
                rows += self._rows(key, sections[0], files)
        return rows

    def _commands(self) -> str:
        text = (
            f"# Commands\n\n{NOTE}\n\nThese keys come in addition to the [groups](README.md) that `--help` lists.\n\n"
        )
        train = definitions()["train.yaml"]["properties"]
        for command in commands():
            script = "train.py" if command == "train" else f"scripts/{command}.py"
            section, more = definitions()[f"{command}.yaml"], ""
            if command in training_commands() and command != "train":
                own = {key: one for key, one in section["properties"].items() if key not in train}
                section, more = {**section, "properties": own}, "Every key of train.py, and:\n\n"
            rows = self._rows("", section, f"configs/{command}.yaml")
            if command == "train":
                methods = definitions()["compression/*.yaml"]["properties"]
                rows += self._rows("compression", {"properties": methods}, "")
            text += f"## {script}\n\n{more}{_table(rows)}"
        return text.rstrip() + "\n"

    def _row(self, name: str, schema: Json, owner: tuple[str, str], entries: list[Entry]) -> str:
        same = [entry for entry in entries if name in (entry.name, entry.key)]
        values = list(dict.fromkeys(entry.value for entry in same))
        value = "by file" if len(values) > 1 else f"`{values[0]}`" if values and values[0] else ""
        comment = next((entry.comment for entry in same if entry.comment), self.comments.get(owner, ""))
        return f"| `{name}` | {_cell(expected(schema))} | {value} | {_cell(comment)} |\n"


def _sections(schema: Json) -> list[Json]:
    return [kind for kind in kinds(schema) if "properties" in kind] if schema else []


def _first_comment(path: Path) -> str:
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return " ".join(line.lstrip("# ") for line in lines if not line.startswith(GLOBAL))


def _table(rows: str) -> str:
    return f"| key | takes | value | meaning |\n|---|---|---|---|\n{rows}\n" if rows else ""


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Escape the characters that Markdown takes for HTML or emphasis."""
    return re.sub(r"`[^`]*`|[<*]", lambda found: {"<": "&lt;", "*": "\\*"}.get(found[0], found[0]), text)
