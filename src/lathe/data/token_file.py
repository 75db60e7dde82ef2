"""Token files: a folder with meta.json and one .npy per split, written from a folder of text, memory-mapped in.

Each .npy holds the ids as little-endian uint16, or uint32 if the vocabulary needs it.
"""

import contextlib
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lathe.config.types import Name
from lathe.config.validation import validated
from lathe.data.splits import SPLITS
from lathe.data.tokens import Tokens
from lathe.errors import UserError, naming, require
from lathe.files import whole

FORMAT, VERSION = "lathe tokens", 1
HOW = "python scripts/prepare_tokens.py input=<folder of text>"


def token_dtype(vocab_size: int) -> str:
    """Return the smaller dtype that can hold all ids."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


class TokenWriter:
    """Writes one split, document by document; `close` (repeatable) completes the header."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        self.path, self.dtype = path, token_dtype(vocab_size)
        self.count = self.documents = 0
        self._hash = hashlib.sha256()
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


class TokenFiles:
    """The source of tokens that scripts/prepare_tokens.py wrote.

    The arguments are those of `source` in configs/data/tokens.yaml, which describes them.
    """

    @validated
    def __init__(self, data_dir: str, name: Name, verify: bool = False) -> None:
        self.folder = Path(data_dir) / name
        self.verify = verify

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The contents of meta.json."""
        path = self.folder / "meta.json"
        lacks = f"{self.folder} holds no token files (data.source.name)"
        require(path.is_file(), f"{lacks}: write them with {HOW} output={self.folder.name}.")
        try:
            meta: dict[str, Any] = json.loads(path.read_bytes())
            head = meta["format"], meta["version"], meta["dtype"]
            fits = head == (FORMAT, VERSION, token_dtype(meta["vocab_size"]))
            fits = fits and all(isinstance(meta["splits"][name]["tokens"], int) for name in SPLITS)
        except (ValueError, TypeError, KeyError, RecursionError):
            fits = False
        require(fits, f"{path} is not version {VERSION} of what {HOW} writes, or is damaged: write it again with it.")
        return meta

    @property
    def vocab_size(self) -> int:
        """Return the number of ids, the end-of-document one included."""
        return int(self.meta["vocab_size"])

    def prepare(self) -> None:
        """Check all files; with `verify`, every byte."""
        for name, tokens in self.load().items():
            if self.verify and hashlib.sha256(tokens.ids.data).hexdigest() != self.meta["splits"][name].get("sha256"):
                raise UserError(
                    f"{self.folder / name}.npy differs from its SHA-256 in meta.json: write it again with {HOW}."
                )

    def load(self) -> dict[str, Tokens]:
        """Memory-map all splits."""
        splits = {}
        for name in SPLITS:
            path, count = self.folder / f"{name}.npy", self.meta["splits"][name]["tokens"]
            try:
                # a plain view: indexing the memmap class calls Python code for every batch
                ids: NDArray[np.uint16] = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
            except (OSError, ValueError, EOFError) as error:
                way = f"write it again with {HOW}"
                raise UserError(f"{path} is missing, or was cut or changed ({error}): {way}.") from error
            fits = ids.shape == (count,) and ids.dtype == np.dtype(self.meta["dtype"]) and count > 0
            require(fits, f"{path} does not have the {count} tokens of meta.json: write it again with more text.")
            splits[name] = Tokens(ids)
        return splits


PIECE = 2**20  # bytes that are read or encoded at a time


def find_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return files below `folder` with one of the suffixes, in any case, sorted; hidden ones are left out."""
    endings = {"." + suffix.lower().lstrip(".") for suffix in suffixes}
    inside = [
        path.relative_to(folder) for path in folder.rglob("*") if path.suffix.lower() in endings and path.is_file()
    ]
    shown = [path for path in inside if not any(part.startswith(".") for part in path.parts)]
    listed = " or ".join(sorted(endings))
    require(
        bool(shown), f"input={folder} has no files that end in {listed}: name a folder that has, or suffixes=[.tex]."
    )
    return [folder / path for path in sorted(shown, key=Path.as_posix)]


def read_documents(path: Path, separator: str | None) -> Iterator[bytes]:
    """Yield the non-empty documents of a file: the file, or the texts between separators."""
    rest = b""
    with open(path, "rb") as file:
        while piece := file.read(-1 if separator is None else PIECE):
            *complete, rest = [rest + piece] if separator is None else (rest + piece).split(separator.encode())
            yield from filter(None, complete)
    if rest:
        yield rest


class Bytes:
    """The tokenizer whose ids are bytes, and 256 ends a document: reads any file without loss."""

    name, vocab_size, end = "bytes", 257, 256

    def encode(self, document: bytes) -> Iterator[NDArray[np.integer[Any]]]:
        yield np.frombuffer(document, np.uint8)


class HuggingFace:
    """A tokenizer of the `tokenizers` package: a tokenizer.json, its folder, or a name on the hub.

    Documents end with the first of `ENDS` in the vocabulary, or with a new id after the last. Long ones are encoded in
    pieces of whole lines, so that memory stays bounded. Special tokens in a text are encoded as text.
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
        size = max(ids.values()) + 1
        self.end = next((ids[word] for word in self.ENDS if word in ids), size)
        self.vocab_size = max(size, self.end + 1)

    def encode(self, document: bytes) -> Iterator[NDArray[np.integer[Any]]]:
        lines = io.BytesIO(document)
        while piece := b"".join(lines.readlines(PIECE)):
            ids = self._backend.encode(piece.decode("utf-8"), add_special_tokens=False).ids
            yield np.asarray(ids, np.int64)


def split_of(document: bytes, seed: int, val_share: float, test_share: float) -> str:
    """Return the split of a document by contents and seed: copies share it, new documents move no others."""
    digest = hashlib.blake2b(document, digest_size=16).digest()
    number = hashlib.blake2b(digest, key=str(seed).encode(), digest_size=8).digest()
    uniform = int.from_bytes(number, "little") / 2**64
    return "val" if uniform < val_share else "test" if uniform < val_share + test_share else "train"


def prepare(cfg: dict[str, Any]) -> dict[str, Any]:
    """Write the token files of `cfg` (configs/prepare_tokens.yaml), all or nothing; return meta.json."""
    val, test = cfg["val_share"], cfg["test_share"]
    require(val + test < 1, f"val_share={val} and test_share={test} leave nothing to train on: choose less.")
    folder, output = Path(cfg["input"]), Path(cfg["paths"]["data_dir"]) / cfg["output"]
    if output.exists():
        ours = (output / "meta.json").is_file()
        way = "give overwrite=true" if ours else "it holds no token files; choose another output"
        require(ours and cfg["overwrite"], f"output={output} is there already: {way}.")
    separator = cfg["separator"]
    if separator is not None:  # a command line cannot contain a newline
        separator = separator.replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t")
    files = find_files(folder, cfg["suffixes"])
    tokenizer = Bytes() if cfg["tokenizer"] == "bytes" else HuggingFace(cfg["tokenizer"])
    output.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(whole(output, replace_folder=True))
        temporary.mkdir()
        writers = {name: TokenWriter(temporary / f"{name}.npy", tokenizer.vocab_size) for name in SPLITS}
        for writer in writers.values():
            stack.callback(writer.close)
        for path in files:
            for document in read_documents(path, separator):
                writer = writers[split_of(document, cfg["split_seed"], val, test)]
                try:
                    for ids in tokenizer.encode(document):
                        writer.write(ids, ends=False)
                except UnicodeDecodeError as error:
                    ways = "convert it, leave it out by suffixes, or use tokenizer=bytes"
                    raise UserError(f"{path} is not UTF-8 text: {ways}.") from error
                writer.write(np.array([tokenizer.end]), ends=True)
        splits = {name: writer.close() for name, writer in writers.items()}
        sizes = [path.stat().st_size for path in files]
        total = sum(facts["documents"] for facts in splits.values())
        require(
            separator is None or total > sum(size > 0 for size in sizes),
            f"separator={cfg['separator']!r} divides none of the {len(files)} files in input={folder}: give what "
            "stands between their documents, or null.",
        )
        for name, facts in splits.items():
            require(
                facts["documents"] > 0,
                f"the {name} split got none of the {total} documents in input={folder}: divide files into more "
                "documents by separator, choose another split_seed, or larger shares.",
            )
        about = {key: cfg[key] for key in ("suffixes", "separator", "split_seed", "val_share", "test_share")}
        about |= {"tokenizer": tokenizer.name, "end": tokenizer.end, "files": len(files), "bytes": sum(sizes)}
        return write_meta(temporary, tokenizer.vocab_size, splits, **about)


def report(cfg: dict[str, Any]) -> None:
    """Run `prepare`, and print what was written and the command that trains on it."""
    meta = prepare(cfg)
    print(
        f"{Path(cfg['paths']['data_dir']) / cfg['output']}: {meta['files']} files, {meta['bytes']:,} bytes, tokenizer "
        f"{meta['tokenizer']}"
    )
    for name, facts in meta["splits"].items():
        print(f"  {name:6}{facts['documents']:>12,} documents {facts['tokens']:>16,} tokens")
    print(
        f"python train.py data=tokens data.source.name={cfg['output']} data.vocab_size={meta['vocab_size']} "
        "model=gpt_nano"
    )
