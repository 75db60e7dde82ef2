"""Print --help <key>: its value in this composition, the values it takes, its comment and its file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lathe.config.override_parsing import LISTS
from lathe.config.resolve import flatten
from lathe.config.schema import canonical, key_schemas, takes
from lathe.config.values import Json, expected
from lathe.config.yaml_comments import (
    Entry,
    command_files,
    comments,
    group_comments,
    one_line,
    read_entries,
)
from lathe.errors import UserError, did_you_mean


def explain_keys(folder: Path, verb: str, keys: Sequence[str], overrides: Sequence[str]) -> str:
    """Explain keys of a command, composed of the files in `folder` and these overrides.

    Raises:
        UserError: there is no such key.
    """
    page = KeyHelp(folder, verb, overrides)
    return "\n\n".join(page.explain(key) for key in keys)


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
        parent, name = self._look_up(key.rpartition(".")[0])[1], key.rpartition(".")[2]
        arguments = _arguments(parent)
        if name in arguments:
            owner = parent["_target_"]
            rows = {"takes": expected(arguments[name]), "means": self.comments.get((owner, name))}
            return f"{key} (an argument of {owner})\n{_table({**rows, 'in': f'no file: add it with +{key}=...'})}"
        if key in self.choices:
            return self._title(key)
        if choice := self._choice_with(key):
            other = KeyHelp(self.folder, self.verb, [*self.overrides, choice], self.entries)
            return f"{other.explain(key)}\n  with    {choice}"
        keys = [*self.schemas, *self.tree, *self.choices, *(f"{key.rpartition('.')[0]}.{one}" for one in arguments)]
        same = sorted((one for one in keys if one.endswith(f".{key}")), key=lambda one: one.count("."))
        hint = f"did you mean {same[0]}?" if same else did_you_mean(key, keys, "--help lists the groups")
        raise UserError(f"--help {key}: unknown key; {hint}")

    def _choice_with(self, key: str) -> str | None:
        """Return the override for the first choice of the key's group that has it."""
        group = key.split(".")[0]
        for name, entries in self.choices.get(group, {}).items():
            if any(f"{key}.".startswith(f"{entry.key}.") and not self._look_up(entry.key)[0] for entry in entries):
                return f"{group}=[{','.join([*LISTS[group], name])}]" if group in LISTS else f"{group}={name}"
        return None

    def _look_up(self, key: str) -> tuple[bool, Any]:
        value: Any = self.tree
        for name in key.split("."):
            if not isinstance(value, Mapping) or name not in value:
                return False, None
            value = value[name]
        return True, value

    def _explain_value(self, key: str, value: Any) -> str:
        schema, entry = self.schemas.get(key), self._entry(key, value)
        parent = self._look_up(key.rpartition(".")[0])[1]
        owner = canonical(parent["_target_"]) if isinstance(parent, Mapping) and "_target_" in parent else ""
        comment = self.comments.get((owner, key.rpartition(".")[2]) if owner else ("", key))
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
        chosen = [(group, name) for group, names in self.chosen.items() for name in _as_list(names)]
        files = [f"configs/{self.verb}.yaml", *(f"configs/{group}/{name}.yaml" for group, name in chosen)]
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
        in_file = {one.key: one.comment for one in self.entries if entry is not None and one.file == entry.file}
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


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _table(rows: Mapping[str, str | None]) -> str:
    return "\n".join(f"  {name:8}{text}" for name, text in rows.items() if text)
