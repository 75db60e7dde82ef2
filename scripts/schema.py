"""Write configs/schema.json and docs/reference from signatures and the comments in configs/.

python scripts/schema.py                  # after a change of a constructor, a YAML file or config/commands.py
python scripts/schema.py package=mine     # also the components of a package under src/
python scripts/schema.py --check          # list the stale files and write none
"""

import argparse
import json
import sys
from pathlib import Path

from lathe.config.schema import check
from lathe.config.schema.pages import Book
from lathe.configs import FOLDER
from lathe.verbs.schema import Schema, text

ROOT = Path(__file__).resolve().parent.parent


def is_stale(path: Path, text: str) -> bool:
    return not path.is_file() or path.read_text(encoding="utf-8") != text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="list the stale files and write none")
    parser.add_argument("package", nargs="*", help="package=<name>, a package under src/")
    options = parser.parse_args()
    schema = FOLDER / "schema.json"
    packages = [word.removeprefix("package=") for word in options.package]
    packages += [name for name in json.loads(schema.read_text()).get("packages", ()) if name not in packages]
    made = {schema: text(Schema(FOLDER, packages).build())}
    if not options.check:
        schema.write_text(made[schema], encoding="utf-8")
        check.definitions.cache_clear()
    if not is_stale(schema, made[schema]):  # the pages are made from it
        made |= {ROOT / "docs" / "reference" / name: page for name, page in Book(FOLDER).pages().items()}
    stale = [path for path, page in made.items() if is_stale(path, page)]
    for path in stale:
        if not options.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(made[path], encoding="utf-8")
        print(path.relative_to(ROOT), "is stale: python scripts/schema.py" if options.check else "")
    sys.exit(bool(stale and options.check))


if __name__ == "__main__":
    main()
