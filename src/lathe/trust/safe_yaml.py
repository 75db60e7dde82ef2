"""Read foreign YAML and JSON within limits of size, depth and syntax, and write such YAML."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_omega_conf_dumper, get_yaml_loader

from lathe.errors import UserError

MAX_BYTES = 1_000_000
MAX_DEPTH = 40
MAX_NODES = 20_000

_ENTRY = re.compile(r"^(?=[^\s#-])", re.MULTILINE)  # the begin of an entry at the top of a mapping
_SIMPLE_KEY = re.compile(r"[A-Za-z_]\w*:[ \n]")

_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast
# OmegaConf's loader, which reads 1e-3 as a number and refuses a key given twice, with that parser.
_Loader: Any = get_yaml_loader()
if _Parser is not yaml.SafeLoader:
    _Loader = type("_Loader", (_Parser, _Loader), {})
# OmegaConf's dumper, which quotes text that reads as a number, with libyaml and without anchors.
_Dumper: Any = type("_Dumper", (getattr(yaml, "CDumper", yaml.Dumper),), {"ignore_aliases": lambda self, data: True})
_Dumper.add_representer(str, get_omega_conf_dumper().str_representer)
_Dumper.add_representer(tuple, yaml.representer.SafeRepresenter.represent_list)


def as_yaml(content: dict[str, Any] | list[Any]) -> str:
    """Return the text of plain containers, which `read_yaml` reads."""
    text = yaml.dump(content, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
    return str(text)


def read_yaml(path: Path, where: str) -> Any:
    """Read a YAML file without interpolations, tags, anchors or anything else that Lathe never writes.

    `where` begins each message, such as `run=logs/latest: its config.yaml`. Raises UserError if the file is not such
    YAML or too large, and OSError if it can't be read at all.
    """
    return parse_yaml(read_bytes(path, where), where)


def read_mapping(path: Path, where: str, known: dict[str, Any]) -> Any:
    """Read one of many files with mostly the same entries; each distinct top-level entry is parsed once.

    `known` keeps the parsed entries by their text. The result must not be changed.
    """
    data = read_bytes(path, where)
    try:
        entries = _ENTRY.split(data.decode())[1:]
    except UnicodeDecodeError:
        entries = []
    tree: dict[Any, Any] = {}
    for text in entries:
        if text not in known:
            try:
                known[text] = parse_yaml(text.encode(), where)
            except UserError:  # a mistake of the whole file, or a value over several lines
                return parse_yaml(data, where)
        entry = known[text]
        if not _SIMPLE_KEY.match(text) or not isinstance(entry, dict) or len(entry) != 1 or tree.keys() & entry.keys():
            return parse_yaml(data, where)
        tree |= entry
    return tree if entries and data.startswith(entries[0].encode()) else parse_yaml(data, where)


def parse_yaml(data: bytes, where: str) -> Any:
    try:
        text = data.decode()
        refused = _refused_syntax(text)
        content = None if refused else yaml.load(text, Loader=_Loader)  # noqa: S506  # SafeLoader's constructors
    except Exception as error:  # a damaged or hostile file may raise anything
        raise UserError(f"{where} can't be read as a configuration.") from error
    if refused:
        raise UserError(f"{where} holds {printable(refused)}, which Lathe never writes: it is not read.")
    return content


def read_json(path: Path, where: str, max_bytes: int = 50_000_000) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises UserError if it is not a JSON object or too large, and OSError if it can't be read at all.
    """
    try:
        content = json.loads(read_bytes(path, where, max_bytes))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} can't be read as JSON: it is cut off or of another kind.") from error
    if not isinstance(content, dict):
        raise UserError(f"{where} can't be read: expected a JSON object, got {type(content).__name__}.")
    return content


def printable(text: str) -> str:
    """Return text of a foreign file without escape sequences, which would control the terminal."""
    text = text if len(text) <= 200 else f"{text[:200]}..."
    return text if text.isascii() and text.isprintable() else ascii(text)


def read_bytes(path: Path, where: str, limit: int = MAX_BYTES) -> bytes:
    if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
        raise UserError(f"{where} is not a file.")
    with open(path, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise UserError(f"{where} has more than {limit} bytes: it is not read.")
    return data


def _refused_syntax(text: str) -> str | None:
    """Return what a YAML text has that Lathe does not write, before anything is built from it."""
    depth = nodes = 0
    for event in yaml.parse(text, Loader=_Parser):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            return "an anchor or an alias"
        if isinstance(event, yaml.NodeEvent):
            nodes += 1
            tag = getattr(event, "tag", None)
            if tag is not None:
                return f"the tag {tag}"
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            depth += 1
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            depth -= 1
        elif isinstance(event, yaml.ScalarEvent) and "${" in event.value:
            return f"the interpolation {event.value[:80]}"
        elif isinstance(event, yaml.ScalarEvent) and event.value == "<<" and event.implicit[0]:
            return "a merge key"
        if depth > MAX_DEPTH:
            return f"more than {MAX_DEPTH} levels"
        if nodes > MAX_NODES:
            return f"more than {MAX_NODES} values"
    return None
