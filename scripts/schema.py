"""Writes what the tables of lathe.config.schema say for editors and readers: python scripts/schema.py (with --check,
says what is stale)
"""

import sys
from pathlib import Path

from lathe.config.schema import as_json
from lathe.config.schema.pages import Book
from lathe.configs import FOLDER

ROOT = Path(__file__).resolve().parent.parent


def files() -> dict[Path, str]:
    """The text of every file that is made from the tables and the comments in configs/."""
    pages = {ROOT / "docs" / "reference" / name: text for name, text in Book(FOLDER).pages().items()}
    return {FOLDER / "schema.json": as_json.text(FOLDER), **pages}


def stale() -> list[Path]:
    """The files that are not there, or not what they would be."""
    return [path for path, text in files().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]


def main() -> None:
    wrong = stale()
    if "--check" in sys.argv[1:]:
        sys.exit(
            "".join(f"{path.relative_to(ROOT)} is stale: python scripts/schema.py\n" for path in wrong) if wrong else 0
        )
    for path in wrong:
        path.parent.mkdir(exist_ok=True)
        path.write_text(files()[path], encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
