"""Write configs/schema.json and docs/reference from signatures and the comments in configs/.

python scripts/schema.py                  # after a change of a constructor, a YAML file or config/commands.py
python scripts/schema.py package=mine     # also the components of a package under src/
python scripts/schema.py --check          # list the stale files and write none
"""

import argparse
import json
import sys
from pathlib import Path

from lathe.config.reference_docs import Book
from lathe.config.schema import definitions
from lathe.configs import FOLDER
from lathe.verbs.schema import Schema, text

ROOT = Path(__file__).resolve().parent.parent


def write(pages: dict[Path, str], check_only: bool) -> list[Path]:
    """Write and print the files that are stale, or only print them; return their paths."""
    stale = [path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not check_only:
            path.parent.mkdir(exist_ok=True)
            path.write_text(pages[path], encoding="utf-8")
        print(path.relative_to(ROOT), "is stale: python scripts/schema.py" if check_only else "")
    return stale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="list the stale files and write none")
    parser.add_argument("package", nargs="*", help="package=<name>, a package under src/")
    options = parser.parse_args()
    schema = FOLDER / "schema.json"
    packages = [word.removeprefix("package=") for word in options.package]
    packages += [name for name in json.loads(schema.read_text()).get("packages", ()) if name not in packages]
    stale = write({schema: text(Schema(FOLDER, packages).build())}, options.check)
    if not (stale and options.check):  # the pages are made from it
        definitions.cache_clear()
        pages = Book(FOLDER).pages().items()
        stale += write({ROOT / "docs" / "reference" / name: page for name, page in pages}, options.check)
    sys.exit(bool(stale and options.check))


if __name__ == "__main__":
    main()
