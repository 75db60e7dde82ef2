"""What `--help <key>` prints: a key's value in this composition, what it takes, what it means and where it stands."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lathe.config.schema.check import key_schemas, takes
from lathe.config.schema.described import Written, choices, comments, files_in, headings, plain, roots, written
from lathe.config.schema.names import canonical
from lathe.config.values import Json, expected
from lathe.errors import UserError, did_you_mean

# groups whose choices act side by side, and what a further one is written behind
BESIDE: dict[str, list[str]] = {"callbacks": ["default"], "logger": ["csv"], "compression": []}


def explained(folder: Path, verb: str, keys: Sequence[str], overrides: Sequence[str]) -> str:
    """What there is to say of some keys of a verb's configuration, composed of the files in `folder` and these
    `overrides`.

    Raises:
        UserError: there is no such key.
    """
    page = Page(folder, verb, overrides)
    return "\n\n".join(page.of(key) for key in keys)


class Page:
    """A composition and all that is known of its keys."""

    def __init__(self, folder: Path, verb: str, overrides: Sequence[str], found: list[Written] | None = None) -> None:
        with initialize_config_dir(str(folder), version_base="1.3"):
            self.verb, self.cfg = verb, compose(verb, overrides=list(overrides), return_hydra_config=True)
        self.folder, self.overrides = folder, overrides
        self.chosen: dict[str, Any] = dict(self.cfg.hydra.runtime.choices)
        tree: Any = OmegaConf.to_container(self.cfg, resolve=False)
        self.tree = {key: value for key, value in tree.items() if key != "hydra"}
        self.schemas: Mapping[str, Json] = key_schemas(self.tree, verb)
        self.found = _written(folder) if found is None else found
        self.groups = {group: files for group, files in choices(self.found).items() if group in self.chosen}
        self.headings = headings(roots(folder))
        self.comments = comments([item for item in self.found if item.file == f"configs/{verb}.yaml"] + self.found)

    def of(self, key: str) -> str:
        """What there is to say of a key or a group of keys."""
        there, value = self._look_up(key)
        if isinstance(value, Mapping) and value and (key not in self.schemas or "_target_" in value):
            return self._group(key, value)
        if there:
            return self._key(key, value)
        parent = self._look_up(key.rpartition(".")[0])[1]
        further = _arguments(parent)
        if key.rpartition(".")[2] in further:
            owner, name = parent["_target_"], key.rpartition(".")[2]
            said = self.comments.get((owner, name))
            lines = {"takes": expected(further[name]), "means": said, "in": f"no file: add it with +{key}=..."}
            return f"{key} (an argument of {owner})\n{_table(lines)}"
        if key in self.groups:
            return self._heading(key)
        if choice := self._choice_with(key):
            return f"{Page(self.folder, self.verb, [*self.overrides, choice], self.found).of(key)}\n  with    {choice}"
        every = {*self.schemas, *(name.rpartition(".")[0] for name in self.schemas), *self.tree, *self.groups} - {""}
        same = [name for name in sorted(every) if name.rpartition(".")[2] == key][:3]
        near = [*every, *(f"{key.rpartition('.')[0]}.{name}" for name in further)]
        hint = f"did you mean {' or '.join(same)}?" if same else did_you_mean(key, near, "--help lists the groups")
        raise UserError(f"--help {key}: unknown key; {hint}")

    def _choice_with(self, key: str) -> str | None:
        """The override with the first choice of its group that has a key, where the chosen one has not."""
        group = key.split(".")[0]
        for name, items in self.groups.get(group, {}).items():
            if any(f"{key}.".startswith(f"{item.key}.") and not self._look_up(item.key)[0] for item in items):
                return f"{group}=[{','.join([*BESIDE[group], name])}]" if group in BESIDE else f"{group}={name}"
        return None

    def _look_up(self, key: str) -> tuple[bool, Any]:
        value: Any = self.tree
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return False, None
            value = value[part]
        return True, value

    def _key(self, key: str, value: Any) -> str:
        schema, place = self.schemas.get(key), self._written(key, value)
        parent = self._look_up(key.rpartition(".")[0])[1]
        owner = canonical(parent["_target_"]) if isinstance(parent, Mapping) and "_target_" in parent else ""
        said = self.comments.get((owner, key.rpartition(".")[2]) if owner else ("", key))
        if place is not None and place.comment and place.owner in ("", owner):
            said = place.comment
        lines = {
            "takes": expected(schema) if schema is not None else None,
            "means": said,
            "in": place.file if place is not None else None,
        }
        return f"{key}={self._shown(key, value)}\n{_table(lines)}"

    def _shown(self, key: str, value: Any) -> str:
        if not isinstance(value, str) or "${" not in value:
            return "???, which has to be given" if value == "???" else plain(value)
        try:
            return f"{plain(OmegaConf.select(self.cfg, key))}, as it follows {value}"
        except OmegaConfBaseException:
            return value

    def _written(self, key: str, value: Any) -> Written | None:
        """The file's line that a key's value stands in: of the files of this composition, else of any with this value,
        else of any.
        """
        group, own = key.split(".")[0], [item for item in self.found if item.key == key]
        files = {f"configs/{name}/{choice}.yaml" for name, chosen in self.chosen.items() for choice in _several(chosen)}
        files.add(f"configs/{self.verb}.yaml")
        same = [item for item in own if item.value == plain(value)] + own
        ranked = sorted(same, key=lambda item: (item.file not in files, not item.file.startswith(f"configs/{group}/")))
        return ranked[0] if ranked else None

    def _heading(self, group: str) -> str:
        lines = {"choices": ", ".join(self.groups[group]), "chosen": plain(self.chosen.get(group))}
        return f"{group}: {self.headings.get(group, 'a group of keys')}\n{_table(lines)}"

    def _group(self, key: str, value: Mapping[str, Any]) -> str:
        rows = [(name, self._shown(name, item), self.schemas.get(name)) for name, item in _leaves(key, value)]
        width, values = max(len(name) for name, *_ in rows), min(28, max(len(item) for _, item, _ in rows))
        place = self._written(key, value)
        said = {item.key: item.comment for item in self.found if place is not None and item.file == place.file}
        lines = []
        for name, item, schema in rows:
            note = f"  # {said[name]}" if key not in self.groups and said.get(name) else ""
            lines.append(f"  {name:{width}}  {item:{values}}  {expected(schema) if schema else ''}{note}".rstrip())
        more = [name for name in _arguments(value) if name not in value]
        head = self._heading(key) if key in self.groups else f"{key}: {said.get(key) or 'a group of keys'}"
        also = f"\n\n  with a plus: {', '.join(f'+{key}.{name}' for name in more)}" if more else ""
        return f"{head}\n\n" + "\n".join(lines) + also


def _written(folder: Path) -> list[Written]:
    """Every key of the files in `folder`, with a warning for each file that can't be read."""
    found: list[Written] = []
    for path in files_in(folder):
        try:
            found += written(folder, [path])
        except yaml.YAMLError as error:
            why = getattr(error, "problem", None) or str(error).splitlines()[0]
            print(f"Warning: {path} can't be read as YAML ({why}), so this help leaves it out.", file=sys.stderr)
    return found


def _arguments(part: Any) -> dict[str, Json]:
    """What the class of a part takes, if that is known."""
    return (takes(part) or {}) if isinstance(part, Mapping) and isinstance(part.get("_target_"), str) else {}


def _several(choice: Any) -> list[str]:
    return (
        [str(item) for item in choice]
        if isinstance(choice, Sequence) and not isinstance(choice, str)
        else [str(choice)]
    )


def _leaves(key: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        return [(key, value)]
    return [leaf for name, item in value.items() for leaf in _leaves(f"{key}.{name}", item)]


def _table(lines: Mapping[str, str | None]) -> str:
    return "\n".join(f"  {name:8}{text}" for name, text in lines.items() if text)
