"""Writes what tables and checks say, for editors and readers: python scripts/schema.py (with --check, says what is
stale)
"""

import ast
import functools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lathe.config.schema import as_json
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


def files(folder: Path = FOLDER) -> dict[Path, str]:
    """The text of every file that is made from tables, checks and the comments in a folder of configurations."""
    pages = {ROOT / "docs" / "reference" / name: text for name, text in Book(folder).pages().items()}
    errors = errors_page(ERRORS.read_text(encoding="utf-8"))
    return {FOLDER / "schema.json": as_json.text(folder), **pages, ERRORS: errors}


def stale(folder: Path = FOLDER) -> dict[Path, str]:
    """The files that are missing or out of date, with their current text."""
    made = files(folder).items()
    return {path: text for path, text in made if not path.is_file() or path.read_text(encoding="utf-8") != text}


def main() -> None:
    unknown = sorted({*sys.argv[1:]} - {"--check"})
    if unknown:
        sys.exit(f"Error: {' '.join(unknown)}: python scripts/schema.py takes --check and nothing else.")
    wrong = stale()
    if "--check" in sys.argv[1:]:
        sys.exit("".join(f"{path.relative_to(ROOT)} is stale: python scripts/schema.py\n" for path in wrong) or 0)
    for path, text in wrong.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
