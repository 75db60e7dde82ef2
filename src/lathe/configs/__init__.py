"""The YAML files as a package, which Hydra finds as `pkg://lathe.configs`: in a wheel they lie beside this file, in a
clone at its root.
"""

from importlib.machinery import SourceFileLoader
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCE: Path | None = None  # `src/` of a clone, which holds the user's packages next to this one
_CLONE = FOLDER.parents[2]
if FOLDER.parent.parent.name == "src" and (_CLONE / "configs" / "train.yaml").is_file():
    SOURCE, FOLDER = _CLONE / "src", _CLONE / "configs"
    # importlib.resources, and so Hydra, looks for a package's files beside the file that its loader names
    __spec__.loader = SourceFileLoader(__name__, str(FOLDER / "__init__.py"))
