"""Documents in a folder of text files, and tokenizers."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lathe.errors import UserError

PIECE = 2**20  # bytes that are read at a time


@dataclass(frozen=True)
class Document:
    """A text: its file, the hash of its bytes, and the bytes in pieces."""

    path: Path
    digest: bytes
    pieces: Iterator[bytes]


def find_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return files below `folder` with one of the suffixes, in any case, sorted; hidden ones are left out."""
    if not folder.is_dir():
        raise UserError(f"input={folder} is not a folder: name one with text files.")
    wanted = {"." + suffix.lower().lstrip(".") for suffix in suffixes}
    inside = [(path.relative_to(folder), path) for path in folder.rglob("*")]
    found = [
        path
        for short, path in sorted(inside, key=lambda pair: pair[0].as_posix())
        if path.suffix.lower() in wanted and path.is_file() and not any(part.startswith(".") for part in short.parts)
    ]
    if not found:
        raise UserError(
            f"input={folder} has no file that ends in {' or '.join(sorted(wanted))}: give others by "
            "suffixes=[.txt,.tex]."
        )
    return found


def _pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            yield piece


def _divided(path: Path, separator: bytes) -> Iterator[bytes]:
    rest = b""
    for piece in _pieces(path):
        *whole, rest = (rest + piece).split(separator)
        yield from whole
    yield rest


def read_documents(path: Path, separator: str | None) -> Iterator[Document]:
    """Yield the non-empty documents of a file: the file, or the texts between separators."""
    if separator is None:
        digest = hashlib.blake2b(digest_size=16)
        for piece in _pieces(path):
            digest.update(piece)
        if path.stat().st_size:
            yield Document(path, digest.digest(), _pieces(path))
        return
    for text in _divided(path, separator.encode()):
        if text:
            yield Document(path, hashlib.blake2b(text, digest_size=16).digest(), iter((text,)))


class Tokenizer(Protocol):
    """Protocol that converts text to ids."""

    name: str
    vocab_size: int
    end: int  # the id after each document

    def encode(self, document: Document) -> Iterator[NDArray[np.integer[Any]]]:
        """Yield the ids of a document in pieces, without the end."""
        ...


class Bytes:
    """Each byte is its id, and 256 ends a document: reads any file without loss."""

    name, vocab_size, end = "bytes", 257, 256

    def encode(self, document: Document) -> Iterator[NDArray[np.integer[Any]]]:
        for piece in document.pieces:
            yield np.frombuffer(piece, np.uint8)


class HuggingFace:
    """A tokenizer of the `tokenizers` package: a tokenizer.json, its folder, or a name on the hub.

    Documents end with the first of `ENDS` in the vocabulary, or with a new id after the last. Documents are encoded in
    pieces that end at a line's end, so that memory stays bounded. Special tokens in a text are encoded as text.
    """

    ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")

    def __init__(self, name: str) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError:
            raise UserError(
                f"tokenizer={name} needs the package tokenizers: pip install -e '.[tokenizers]', or use "
                "tokenizer=bytes."
            ) from None
        path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
        try:
            self._backend = Backend.from_file(str(path)) if path.exists() else Backend.from_pretrained(name)
        except Exception as error:  # the package raises bare Exception
            reason = " ".join(str(error).split())
            raise UserError(
                f"tokenizer={name} can't be loaded: name a tokenizer.json, its folder, or one on the hub ({reason})."
            ) from error
        self.name = name
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        ids: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        own = max(ids.values()) + 1
        self.end = next((ids[word] for word in self.ENDS if word in ids), own)
        self.vocab_size = max(own, self.end + 1)

    def encode(self, document: Document) -> Iterator[NDArray[np.integer[Any]]]:
        rest = b""
        for piece in document.pieces:
            whole, newline, rest = (rest + piece).rpartition(b"\n")
            if whole or newline:
                yield self._ids(whole + newline, document)
        yield self._ids(rest, document)

    def _ids(self, text: bytes, document: Document) -> NDArray[np.integer[Any]]:
        try:
            words = text.decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(
                f"{document.path} is not UTF-8 text: convert it, leave it out by suffixes, or use tokenizer=bytes."
            ) from None
        return np.asarray(self._backend.encode(words, add_special_tokens=False).ids, np.int64)


def make_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer for `bytes`, or a Hugging Face tokenizer by path or name."""
    return Bytes() if name == "bytes" else HuggingFace(name)
