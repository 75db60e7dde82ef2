"""Token files: a folder with meta.json and one .npy per split, streamed out and memory-mapped in.

Each .npy (format 1.0, which NumPy reads too) is a header of 128 bytes and then the ids as little-endian uint16, or
uint32 if the vocabulary needs it. The header is compared with that expected by meta.json, byte for byte, so it is never
parsed.
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
from lathe.data.base import SPLITS
from lathe.data.tokens import Tokens
from lathe.errors import UserError, naming

FORMAT, VERSION = "lathe tokens", 1
HEADER = 128  # bytes before the first id
HOW = "python scripts/prepare_tokens.py input=<folder of text>"


def token_dtype(vocab_size: int) -> str:
    """Return the smaller dtype that can hold all ids."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


def header(dtype: str, count: int) -> bytes:
    """Return the first 128 bytes of a .npy file of `count` numbers."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({count},), }}".ljust(HEADER - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + (HEADER - 10).to_bytes(2, "little") + text.encode("ascii")


class TokenWriter:
    """Writes one split, piece by piece; `close` (repeatable) completes the header."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        self.dtype = token_dtype(vocab_size)
        self.count = 0
        self.documents = 0
        self._hash = hashlib.sha256()
        self.path = path
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115 - `close` closes it
        self._file.write(header(self.dtype, 0))

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
                self._file.write(header(self.dtype, self.count))
                self._file.close()
        return {"tokens": self.count, "documents": self.documents, "sha256": self._hash.hexdigest()}


def write_meta(folder: Path, vocab_size: int, splits: dict[str, dict[str, Any]], **about: Any) -> dict[str, Any]:
    """Write meta.json and return its contents; `about` describes the tokenization."""
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "vocab_size": vocab_size,
        "dtype": token_dtype(vocab_size),
        "splits": splits,
    }
    (folder / "meta.json").write_text(json.dumps(meta | about, indent=2) + "\n")
    return meta | about


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the contents of meta.json."""
    path = folder / "meta.json"
    if not folder.is_dir():
        raise UserError(f"{folder} is not there (data.source.name): write it with {HOW} output={folder.name}.")
    try:
        meta = json.loads(path.read_bytes())
        assert meta["format"] == FORMAT
    except FileNotFoundError:
        raise UserError(f"{folder} holds no token files, as it has no meta.json: write them with {HOW}.") from None
    except (ValueError, TypeError, KeyError, AssertionError, RecursionError) as error:
        raise UserError(
            f"{path} was not written by scripts/prepare_tokens.py, or is damaged: write it again with {HOW}."
        ) from error
    if meta.get("version") != VERSION:
        raise UserError(
            f"{path} has version {meta.get('version')} and this code reads version {VERSION}: write it again with "
            f"{HOW}."
        )
    try:
        vocab_size, counts = meta["vocab_size"], [meta["splits"][name]["tokens"] for name in SPLITS]
        assert all(isinstance(value, int) and not isinstance(value, bool) for value in (vocab_size, *counts))
        assert vocab_size > 0
        assert min(counts) >= 0
        assert meta["dtype"] == token_dtype(vocab_size)
    except (TypeError, KeyError, AssertionError) as error:
        raise UserError(
            f"{path} was not written by scripts/prepare_tokens.py, or is damaged: write it again with {HOW}."
        ) from error
    return dict(meta)


def open_split(folder: Path, name: str, meta: dict[str, Any]) -> NDArray[np.uint16] | NDArray[np.uint32]:
    """Return the ids of a split, memory-mapped, read-only."""
    path, count, dtype = folder / f"{name}.npy", meta["splits"][name]["tokens"], np.dtype(meta["dtype"])
    if not path.is_file():
        raise UserError(f"{path} is missing: write it again with {HOW}.")
    if count == 0:
        raise UserError(
            f"{path} has no tokens: prepare more text, or choose another split_seed or larger shares there."
        )
    size, expected = path.stat().st_size, HEADER + count * dtype.itemsize
    if size != expected:
        raise UserError(
            f"{path} has {size} bytes and meta.json says {expected}: it was cut or changed; write it again with {HOW}."
        )
    with open(path, "rb") as file:
        if file.read(HEADER) != header(meta["dtype"], count):
            raise UserError(f"{path} is not the file that meta.json describes: write it again with {HOW}.")
    # a plain view: indexing the memmap class calls Python code for every batch
    ids: NDArray[np.uint16] = np.asarray(np.memmap(path, dtype, "r", offset=HEADER, shape=(count,)))
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
