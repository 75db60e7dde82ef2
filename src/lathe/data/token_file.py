"""Token files on disk: a folder with meta.json and one .npy per split, written as a stream and read as a memory map.

Each .npy (format 1.0, which NumPy reads too) is a header of 128 bytes and then the ids as little-endian uint16, or
uint32 where the vocabulary needs it. The header follows from the type and the count in meta.json, and must be equal to
it byte for byte: nothing of a file is ever interpreted.
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
    """The smallest of the two types that holds all ids."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


def header(dtype: str, count: int) -> bytes:
    """The first 128 bytes of a .npy file of `count` numbers."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({count},), }}".ljust(HEADER - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + (HEADER - 10).to_bytes(2, "little") + text.encode("ascii")


class TokenWriter:
    """Writes one split, piece by piece; `close`, once or more often, completes the header and returns what meta.json
    says of the file.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self.dtype = token_dtype(vocab_size)
        self.count = 0
        self.documents = 0
        self._hash = hashlib.sha256()
        self.path = path
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115 - `close` closes it
        self._file.write(header(self.dtype, 0))

    def write(self, ids: NDArray[np.integer], ends: bool) -> None:
        """Appends ids [n]; `ends` says that a document is complete with them."""
        data = ids.astype(self.dtype).tobytes()
        with naming(self.path):
            self._file.write(data)
        self._hash.update(data)
        self.count += len(ids)
        self.documents += ends

    def close(self) -> dict[str, Any]:
        """{"tokens", "documents", "sha256"}, the last of all bytes behind the header."""
        if not self._file.closed:
            with naming(self.path):
                self._file.seek(0)
                self._file.write(header(self.dtype, self.count))
                self._file.close()
        return {"tokens": self.count, "documents": self.documents, "sha256": self._hash.hexdigest()}


def write_meta(folder: Path, vocab_size: int, splits: dict[str, dict[str, Any]], **about: Any) -> dict[str, Any]:
    """Writes meta.json beside the files and returns its contents. `about` says how the text was made into tokens."""
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
    """The contents of meta.json.

    Raises:
        UserError: there is none, it is not one of these files', it is damaged, or its version is another.
    """
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
    """The ids of a split, memory-mapped, read-only.

    Raises:
        UserError: the file is missing, empty, shorter or longer than meta.json says, or of another kind.
    """
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
    # a plain view: indexing the memmap class itself costs Python calls for every batch
    ids: NDArray[np.uint16] = np.asarray(np.memmap(path, dtype, "r", offset=HEADER, shape=(count,)))
    return ids


class TokenFiles:
    """The source of tokens that scripts/prepare_tokens.py wrote.

    Args:
        data_dir: folder of data sets.
        name: the folder in it, or an absolute path.
        verify: compare every file with its SHA-256 in `prepare`, which reads all of it; sizes and headers are always
            compared.

    Raises:
        UserError: on use, for anything that is missing, cut, foreign or of another version.
    """

    @validated
    def __init__(self, data_dir: str, name: Name, verify: bool = False) -> None:
        self.folder = Path(data_dir) / name
        self.verify = verify
        self._meta: dict[str, Any] | None = None

    @property
    def meta(self) -> dict[str, Any]:
        """The contents of meta.json, read once."""
        if self._meta is None:
            self._meta = read_meta(self.folder)
        return self._meta

    @property
    def vocab_size(self) -> int:
        """How many ids the tokenizer has, the end-of-document one included."""
        return int(self.meta["vocab_size"])

    def prepare(self) -> None:
        """Checks all files; with `verify`, every byte of them."""
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
        """Maps all splits."""
        return {name: Tokens(open_split(self.folder, name, self.meta)) for name in SPLITS}
