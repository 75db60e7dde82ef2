"""Write configs/schema.json and docs/reference from the tables: python scripts/schema.py (--check only lists stale
files).
"""

import sys
from pathlib import Path

from lathe.config.schema import as_json
from lathe.config.schema.pages import Book
from lathe.configs import FOLDER

ROOT = Path(__file__).resolve().parent.parent


def files(folder: Path = FOLDER) -> dict[Path, str]:
    """The text of every file that is made from tables and the comments in a folder of configurations."""
    pages = {ROOT / "docs" / "reference" / name: text for name, text in Book(folder).pages().items()}
    return {FOLDER / "schema.json": as_json.text(folder), **pages}


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
