"""Token files: a folder with meta.json and one .npy per split, streamed out and memory-mapped in.

Each .npy holds the ids as little-endian uint16, or uint32 if the vocabulary needs it.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lathe.config.types import Name
from lathe.config.validation import validated
from lathe.data.splits import SPLITS
from lathe.data.tokens import Tokens
from lathe.errors import UserError, naming, require

FORMAT, VERSION = "lathe tokens", 1
HOW = "python scripts/prepare_tokens.py input=<folder of text>"


def token_dtype(vocab_size: int) -> str:
    """Return the smaller dtype that can hold all ids."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


class TokenWriter:
    """Writes one split, piece by piece; `close` (repeatable) completes the header."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        self.dtype = token_dtype(vocab_size)
        self.count = 0
        self.documents = 0
        self._hash = hashlib.sha256()
        self.path = path
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115 - `close` closes it
        self._write_header()

    def _write_header(self) -> None:
        # NumPy leaves room for a larger shape, so the length of the header does not depend on it
        facts = {"descr": self.dtype, "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._file, facts)

    def write(self, ids: NDArray[np.integer], ends: bool) -> None:
        """Append ids [n]; `ends` if they complete a document."""
        data = ids.astype(self.dtype).tobytes()
        with naming(self.path):
            self._file.write(data)
        self._hash.update(data)
        self.count += len(ids)
        self.documents += ends

    def close(self) -> dict[str, Any]:
        """Return {"tokens", "documents", "sha256"} for meta.json; the hash leaves out the header."""
        if not self._file.closed:
            with naming(self.path):
                self._file.seek(0)
                self._write_header()
                self._file.close()
        return {"tokens": self.count, "documents": self.documents, "sha256": self._hash.hexdigest()}


def write_meta(folder: Path, vocab_size: int, splits: dict[str, dict[str, Any]], **about: Any) -> dict[str, Any]:
    """Write meta.json and return its contents; `about` describes the tokenization."""
    dtype = token_dtype(vocab_size)
    meta = {"format": FORMAT, "version": VERSION, "vocab_size": vocab_size, "dtype": dtype, "splits": splits, **about}
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    return meta


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the contents of meta.json."""
    path = folder / "meta.json"
    if not path.is_file():
        raise UserError(
            f"{folder} holds no token files (data.source.name): write them with {HOW} output={folder.name}."
        )
    try:
        meta: dict[str, Any] = json.loads(path.read_bytes())
        known = (meta["format"], meta["version"], meta["dtype"]) == (FORMAT, VERSION, token_dtype(meta["vocab_size"]))
        known = known and all(isinstance(meta["splits"][name]["tokens"], int) for name in SPLITS)
    except (ValueError, TypeError, KeyError, RecursionError):
        known = False
    require(known, f"{path} is not version {VERSION} of what {HOW} writes, or is damaged: write it again with it.")
    return meta


def open_split(folder: Path, name: str, meta: dict[str, Any]) -> NDArray[np.uint16] | NDArray[np.uint32]:
    """Return the ids of a split, memory-mapped, read-only."""
    path, count = folder / f"{name}.npy", meta["splits"][name]["tokens"]
    try:
        # a plain view: indexing the memmap class calls Python code for every batch
        ids: NDArray[np.uint16] = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} is missing, or was cut or changed ({error}): write it again with {HOW}.") from error
    fits = ids.shape == (count,) and ids.dtype == np.dtype(meta["dtype"]) and count > 0
    require(fits, f"{path} does not have the {count} tokens of meta.json: write it again with {HOW}, from more text.")
    return ids


class TokenFiles:
    """The source of tokens that scripts/prepare_tokens.py wrote.

    Args:
        data_dir: folder of data sets.
        name: the folder in it, or an absolute path.
        verify: compare every file with its SHA-256 in `prepare`; sizes and headers are always compared.
    """

    @validated
    def __init__(self, data_dir: str, name: Name, verify: bool = False) -> None:
        self.folder = Path(data_dir) / name
        self.verify = verify
        self._meta: dict[str, Any] | None = None

    @property
    def meta(self) -> dict[str, Any]:
        """Return the contents of meta.json, read once."""
        if self._meta is None:
            self._meta = read_meta(self.folder)
        return self._meta

    @property
    def vocab_size(self) -> int:
        """Return the number of ids, the end-of-document one included."""
        return int(self.meta["vocab_size"])

    def prepare(self) -> None:
        """Check all files; with `verify`, every byte."""
        for name, tokens in self.load().items():
            if self.verify:
                digest = hashlib.sha256()
                for piece in np.array_split(tokens.ids, max(1, math.ceil(len(tokens.ids) / 2**22))):
                    digest.update(piece.tobytes())
                if digest.hexdigest() != self.meta["splits"][name].get("sha256"):
                    raise UserError(
                        f"{self.folder / name}.npy differs from its SHA-256 in meta.json: write it again with {HOW}."
                    )

    def load(self) -> dict[str, Tokens]:
        """Memory-map all splits."""
        return {name: Tokens(open_split(self.folder, name, self.meta)) for name in SPLITS}
