"""The pages of docs/reference: every key by group and class, with what it takes, its value in the files and its
comment.
"""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

from lathe.config.schema.as_json import BUILDER
from lathe.config.schema.check import CLASSES, GLOBAL
from lathe.config.schema.described import Written, comments, files_of, headings, parts, written
from lathe.config.schema.names import canonical
from lathe.config.schema.optim import OPTIMIZERS
from lathe.config.schema.places import Keys, Parts, Place
from lathe.config.schema.rule import Rule
from lathe.config.schema.verbs import TRAIN, TRAINING, VERBS

NOTE = "<!-- Written by `python scripts/schema.py` from src/lathe/config/schema and the comments in configs/. -->"


class Book:
    """What the tables and the files in `folder` say."""

    def __init__(self, folder: Path) -> None:
        files = files_of(folder)
        self.folder, self.found = folder, written(folder, files)
        self.headings = headings([path for path in files if path.parent == folder])
        self.said, self.built = comments(self.found), parts(self.found)

    def pages(self) -> dict[str, str]:
        """The text of each page by the name of its file."""
        groups = {key: place for key, place in TRAIN.items() if not isinstance(place, Rule)} | {
            "target": VERBS["export"]["target"]
        }
        names = [key for key in groups if key != "paths"]
        pages = {f"{name}.md": self._group(name, groups[name]) for name in names}
        pages["commands.md"] = self._commands()
        rows = "".join(f"- [{name}]({name}.md): {self.headings.get(name, '')}\n" for name in names)
        index = "- [commands](commands.md): what train.py and each script take beside the groups\n"
        pages["README.md"] = (
            f"# Every key\n\n{NOTE}\n\n`python train.py --help <key>` says the same of one key, with its value in your "
            f"composition. An argument without a value stands in no file: add it with a plus.\n\n{index}{rows}"
        )
        return pages

    def _group(self, group: str, place: Place) -> str:
        files = "".join(
            f"- `{path.stem}`: {_escaped(_first_words(path))}\n"
            for path in sorted((self.folder / group).glob("*.yaml"))
        )
        title = self.headings.get(group, "")
        text = f"# {group}\n\n{NOTE}\n\n{title[:1].upper()}{title[1:]}.\n\n{files}\n"
        if isinstance(place, (Keys, Parts)):
            text += _table(self._rows(group, place.keys if isinstance(place, Keys) else place.settings, ""))
        below = [key for key in self.built if key == group or key.startswith(f"{group}.")]
        done: list[str] = []
        for key in below:
            for name in self.built[key]:
                if name in CLASSES and name not in done and name != "hydra.utils.get_class":
                    done.append(name)
                    text += f"## `{self._typed(name, key)}`\n\n`{name}`\n\n{self._class(name)}"
        return text.rstrip() + "\n"

    def _typed(self, name: str, key: str) -> str:
        """What is typed for a class that the files build at a key: a choice, the key, or an item of a list."""
        group = key.split(".")[0]
        if "[" in key:
            return f"{key.partition('[')[0]}=[{{_target_: {name}}}]"
        if isinstance(TRAIN[group], Parts):
            return key
        choice = self._choosing(group, [item for item in self.found if item.owner == name])
        return choice if key in (group, "model.net") else f"{choice} {key}"

    def _choosing(self, group: str, items: list[Written]) -> str:
        """The choices of a group whose files have some of these keys, as they are typed."""
        names = dict.fromkeys(Path(item.file).stem for item in items if item.file.startswith(f"configs/{group}/"))
        return f"{group}={','.join(names)}"

    def _class(self, name: str) -> str:
        own = [item for item in self.found if item.owner == name]
        text = _table("".join(self._row(key, rule, (name, key), own) for key, rule in CLASSES[name].items()))
        for kind, options in OPTIMIZERS.items() if name == BUILDER else ():
            files = {
                item.file for item in self.found if item.key == "optimizer.kind.path" and canonical(item.value) == kind
            }
            named = [item for item in own if item.file in files] or [item for item in self.found if item.owner == kind]
            typed = self._choosing("optimizer", named) if named else f"optimizer.kind.path={kind}"
            text += f"### `{typed}`\n\n`{kind}`\n\n" + _table(
                "".join(self._row(key, rule, (name, key), named) for key, rule in options.items())
            )
        return text

    def _rows(self, prefix: str, keys: Mapping[str, Place], files: str) -> str:
        """A row for each key, with what the files whose names begin with `files` say of it."""
        rows = ""
        for name, place in keys.items():
            key = f"{prefix}.{name}" if prefix else name
            own = [item for item in self.found if item.key == key and item.file.startswith(files)]
            if isinstance(place, Rule):
                rows += self._row(key, place, ("", key), own, key)
            elif isinstance(place, Keys) and place != TRAIN.get(key) and key not in ("precision", "target"):
                rows += self._rows(key, place.keys, files)
        return rows

    def _commands(self) -> str:
        text = (
            f"# Commands\n\n{NOTE}\n\nBeside the keys here they take those of the [groups](README.md) that `--help` "
            "lists.\n\n"
        )
        for verb, tree in VERBS.items():
            script = "train.py" if verb == "train" else f"scripts/{verb}.py"
            methods = tree.get("compression") if verb == "train" else None
            if verb in TRAINING and verb != "train":  # beside the keys of train.py
                tree = {key: place for key, place in tree.items() if key not in TRAIN}
            keys = tree | ({"compression": Keys(methods.settings)} if isinstance(methods, Parts) else {})
            more = "Every key of train.py, and:\n\n" if verb in TRAINING and verb != "train" else ""
            text += f"## {script}\n\n{more}{_table(self._rows('', keys, f'configs/{verb}.yaml'))}"
        return text.rstrip() + "\n"

    def _row(self, name: str, rule: Rule, owner: tuple[str, str], own: list[Written], key: str = "") -> str:
        same = [item for item in own if (item.key == key if key else item.name == name)]
        values = list(dict.fromkeys(item.value for item in same))
        value = "by file" if len(values) > 1 else f"`{values[0]}`" if values and values[0] else ""
        said = next((item.comment for item in same if item.comment), self.said.get(owner, ""))
        return f"| `{name}` | {_cell(rule.expected())} | {value} | {_cell(said)} |\n"


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
