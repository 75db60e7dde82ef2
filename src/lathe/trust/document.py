"""Reading YAML and JSON that somebody else may have written: mappings, lists, words and numbers, and no more than such
a file has; and writing such YAML.
"""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_omega_conf_dumper, get_yaml_loader

from lathe.errors import UserError
from lathe.trust.signing import is_signed_config

MAX_BYTES = 1_000_000
MAX_DEPTH = 40
MAX_NODES = 20_000

# Where an entry of a mapping begins that is not indented: no list's item, comment or continued value does so.
_ENTRY = re.compile(r"^(?=[^\s#-])", re.MULTILINE)
_PLAIN = re.compile(r"[A-Za-z_]\w*:[ \n]")

_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast
# OmegaConf's, for its numbers (1e-3) and its refusal of a key that stands twice, over that parser.
_Loader: Any = get_yaml_loader()
if _Parser is not yaml.SafeLoader:
    _Loader = type("_Loader", (_Parser, _Loader), {})
# OmegaConf's, for its quotes around words that read as numbers, over libyaml; what stands twice is written twice.
_Dumper: Any = type("_Dumper", (getattr(yaml, "CDumper", yaml.Dumper),), {"ignore_aliases": lambda self, data: True})
_Dumper.add_representer(str, get_omega_conf_dumper().str_representer)
_Dumper.add_representer(tuple, yaml.representer.SafeRepresenter.represent_list)


def as_yaml(content: dict[str, Any] | list[Any]) -> str:
    """The text of plain containers, which `read_yaml` reads."""
    text = yaml.dump(content, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
    return str(text)


def read_yaml(path: Path, where: str) -> Any:
    """The content of a YAML file that Lathe has written, without interpolations, tags, anchors or anything else that it
    never writes.

    `where` begins each sentence, such as `run=logs/latest: its config.yaml`.

    Raises:
        UserError: the file is no such YAML, or larger than such a file can be.
        OSError: it can't be read at all.
    """
    return _parsed(_bytes(path, where, MAX_BYTES), where)


def read_signed(path: Path, where: str) -> tuple[Any, bool]:
    """As `read_yaml`, and whether this user has signed the file (lathe.trust.signing)."""
    data = _bytes(path, where, MAX_BYTES)
    return _parsed(data, where), is_signed_config(data)


def is_signed(run: Path) -> bool:
    """As `read_signed`, of the config.yaml of a run directory; False if it can't be read."""
    with suppress(UserError, OSError):
        return is_signed_config(_bytes(run / "config.yaml", str(run), MAX_BYTES))
    return False


def read_mapping(path: Path, where: str, known: dict[str, Any]) -> Any:
    """As `read_yaml`, for one of many files whose mappings have most entries in common: an entry of the top is parsed
    when it is met for the first time, and kept in `known` by its text. Nobody may change what is returned."""
    data = _bytes(path, where, MAX_BYTES)
    try:
        entries = _ENTRY.split(data.decode())[1:]
    except UnicodeDecodeError:
        entries = []
    found: dict[Any, Any] = {}
    for text in entries:
        if text not in known:
            try:
                known[text] = _parsed(text.encode(), where)
            except UserError:  # what stands there is told of the whole file, or is a value over several lines
                return _parsed(data, where)
        entry = known[text]
        if not _PLAIN.match(text) or not isinstance(entry, dict) or len(entry) != 1 or found.keys() & entry.keys():
            return _parsed(data, where)
        found |= entry
    return found if entries and data.startswith(entries[0].encode()) else _parsed(data, where)


def _parsed(data: bytes, where: str) -> Any:
    try:
        text = data.decode()
        foreign = _foreign(text)
        content = None if foreign else yaml.load(text, Loader=_Loader)  # noqa: S506  # SafeLoader's constructors
    except Exception as error:  # a torn or hostile file can fail in nearly any way, also by what its values mean
        raise UserError(f"{where} can't be read as a configuration.") from error
    if foreign:
        raise UserError(f"{where} holds {shown(foreign)}, which Lathe never writes: it is not read.")
    return content


def read_json(path: Path, where: str, max_bytes: int = 50_000_000) -> dict[str, Any]:
    """The object in a JSON file that Lathe has written.

    Raises:
        UserError: the file holds no JSON object, or is larger than `max_bytes`.
        OSError: it can't be read at all.
    """
    try:
        content = json.loads(_bytes(path, where, max_bytes))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} can't be read as JSON: it is cut off or of another kind.") from error
    if not isinstance(content, dict):
        raise UserError(f"{where} can't be read: expected a JSON object, got {type(content).__name__}.")
    return content


def shown(text: str) -> str:
    """Words of a foreign file as they may stand on a terminal, which escape sequences would command."""
    text = text if len(text) <= 200 else f"{text[:200]}..."
    return text if text.isascii() and text.isprintable() else ascii(text)


def _bytes(path: Path, where: str, limit: int) -> bytes:
    if path.exists() and not path.is_file():  # opening a pipe would wait for ever
        raise UserError(f"{where} is no file.")
    with open(path, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise UserError(f"{where} has more than {limit} bytes, which no such file has: it is not read.")
    return data


def _foreign(text: str) -> str | None:
    """What stands in a YAML text that Lathe does not write, told before anything is built from it."""
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
