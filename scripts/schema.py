"""Writes what tables and checks say, for editors and readers: python scripts/schema.py (with --check, says what is
stale)
"""

import argparse
import ast
import functools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lathe.config.schema import check
from lathe.config.schema.json_schema import Schema, text
from lathe.config.schema.pages import Book
from lathe.configs import FOLDER

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "lathe"
ERRORS = ROOT / "docs" / "errors.md"
BEGIN, END = "<!-- every message, by `python scripts/schema.py` -->\n", "<!-- end of every message -->\n"
WORDS = 4  # fewer, beside what varies, are part of a sentence and none of their own


def _text(node: ast.AST, known: Mapping[str, str]) -> str:
    """A string expression with `…` for what is only known when it is evaluated."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, known) for part in parts)
        case ast.FormattedValue(value=ast.Name(id=name)) | ast.Name(id=name):
            return known.get(name, "…")
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, known) + _text(right, known)
    return "…"


def template(node: ast.AST, known: Mapping[str, str]) -> str:
    """The sentence of a string expression, on one line."""
    return re.sub(r"…(\s?…)+", "…", " ".join(_text(node, known).split()))


def _choices(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.IfExp):
        yield from _choices(node.body)
        yield from _choices(node.orelse)
    else:
        yield node


def _named(body: Sequence[ast.stmt], known: Mapping[str, str]) -> dict[str, str]:
    """`known`, and the sentences that `body` gives a name, once each."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    texts: dict[str, list[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            texts.setdefault(node.targets[0].id, []).append(template(node.value, known))
    return {**known, **{name: found[0] for name, found in texts.items() if len(found) == 1}}


def _scopes(path: Path) -> Iterator[tuple[ast.stmt, dict[str, str]]]:
    """The statements of a module and its classes, in their order, and the names of sentences that hold in each."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known = _named([node for node in tree.body if isinstance(node, ast.Assign)], {})
    for node in tree.body:
        for part in node.body if isinstance(node, ast.ClassDef) else [node]:
            yield part, _named(part.body, known) if isinstance(part, ast.FunctionDef) else known


def _said(path: Path) -> Iterator[str]:
    """What errors are made of, what `require` is given, and what checks yield, in the order of the file."""
    for statement, known in _scopes(path):
        found: list[ast.expr] = []
        for node in ast.walk(statement):
            match node:
                case ast.Call(func=ast.Name(id="require"), args=[_, sentence]):
                    found.append(sentence)
                case ast.Raise(exc=ast.Call(args=sentences)):
                    found += sentences
                case ast.Call(func=ast.Name(id="UserError"), args=[sentence]):
                    found.append(sentence)
                case ast.Yield(value=ast.expr() as value):
                    found.append(value)
        for expression in sorted(found, key=lambda node: (node.lineno, node.col_offset)):
            for choice in _choices(expression):
                text = template(choice, known)
                if len(re.findall(r"[A-Za-z]{2,}", text)) >= WORDS:
                    yield text


def messages() -> dict[str, list[str]]:
    """By room of the package, each sentence with which it refuses, once."""
    rooms: dict[str, dict[str, None]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        rooms.setdefault(room, {}).update(dict.fromkeys(_said(path)))
    return {room: list(texts) for room, texts in sorted(rooms.items()) if texts}


@functools.cache
def templates() -> set[str]:
    """Every string of the package as a sentence: messages are also warnings, and what functions return."""
    strings = ast.Constant | ast.JoinedStr | ast.BinOp
    scopes = [scope for path in SOURCE.rglob("*.py") for scope in _scopes(path)]
    return {template(node, known) for part, known in scopes for node in ast.walk(part) if isinstance(node, strings)}


def unsaid(page: str) -> list[str]:
    """The headings of the page of errors that no sentence of the package has, piece by piece and in their order."""
    sentences = templates()
    lost = []
    for heading in re.findall(r"^### `(.*?)`", page.partition(BEGIN)[0], flags=re.MULTILINE):
        pieces = " ".join(heading.split()).split("…")
        longest = max(pieces, key=len)
        near = [sentence for sentence in sentences if longest in sentence]
        if not any(re.search(".*".join(map(re.escape, pieces)), sentence) for sentence in near):
            lost.append(heading)
    return lost


def errors_page(page: str) -> str:
    """The page of errors with its list of every message made anew."""
    head, begin, rest = page.partition(BEGIN)
    assert begin, f"{ERRORS}: its line {BEGIN.strip()} is gone"
    lines = [
        f"\n### {room}\n\n" + "".join(f"- {_code(text)}\n" for text in texts) for room, texts in messages().items()
    ]
    return head + begin + "".join(lines) + "\n" + END + rest.partition(END)[2]


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def pages(folder: Path = FOLDER) -> dict[Path, str]:
    """Return the text of every page that is made from configs/schema.json and the comments in a folder."""
    made = {ROOT / "docs" / "reference" / name: text for name, text in Book(folder).pages().items()}
    return {**made, ERRORS: errors_page(ERRORS.read_text(encoding="utf-8"))}


def is_stale(path: Path, text: str) -> bool:
    return not path.is_file() or path.read_text(encoding="utf-8") != text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="report stale files and write none")
    parser.add_argument("package", nargs="*", help="package=<name>: also the components of a package under src/")
    options = parser.parse_args()
    packages = [word.removeprefix("package=") for word in options.package]
    schema = FOLDER / "schema.json"
    packages += [name for name in json.loads(schema.read_text()).get("packages", ()) if name not in packages]
    new = text(Schema(FOLDER, packages).build())
    stale = [schema] if is_stale(schema, new) else []
    if stale and not options.check:
        schema.write_text(new, encoding="utf-8")
        check.definitions.cache_clear()
    if not (stale and options.check):  # the pages are made from it
        for path, page in pages().items():
            if is_stale(path, page):
                stale.append(path)
                if not options.check:
                    path.parent.mkdir(exist_ok=True)
                    path.write_text(page, encoding="utf-8")
    for path in stale:
        print(
            f"{path.relative_to(ROOT)} is stale: python scripts/schema.py" if options.check else path.relative_to(ROOT)
        )
    sys.exit(bool(stale and options.check))


if __name__ == "__main__":
    main()
