"""Converts a folder of text to token files, for scripts/prepare_tokens.py."""

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from lathe.data.base import SPLITS
from lathe.data.text import find_files, make_tokenizer, read_documents
from lathe.data.token_file import TokenWriter, write_meta
from lathe.errors import UserError
from lathe.files import whole


def split_of(digest: bytes, seed: int, val_share: float, test_share: float) -> str:
    """Return the split of a document by contents and seed: copies share it, new documents move no others."""
    number = hashlib.blake2b(digest, key=str(seed).encode(), digest_size=8).digest()
    place = int.from_bytes(number, "little") / 2**64
    return "val" if place < val_share else "test" if place < val_share + test_share else "train"


def prepare(cfg: dict[str, Any]) -> dict[str, Any]:
    """Write the token files of `cfg` (configs/prepare_tokens.yaml), all or nothing; return meta.json.

    Raises:
        UserError: there is nothing to train on, no text, an existing output, or a split without documents.
    """
    val, test = cfg["val_share"], cfg["test_share"]
    if val + test >= 1:
        raise UserError(f"val_share={val} and test_share={test} leave nothing to train on: choose less.")
    folder, output = Path(cfg["input"]), Path(cfg["paths"]["data_dir"]) / cfg["output"]
    old = output / "meta.json"
    if output.exists() and not (cfg["overwrite"] and old.is_file()):
        way = (
            "give overwrite=true, or another output"
            if old.is_file()
            else "it holds no token files; choose another output"
        )
        raise UserError(f"output={output} is there already: {way}.")
    separator = cfg["separator"]
    if separator is not None:  # a command line cannot contain a newline
        separator = separator.replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t")
    files = find_files(folder, cfg["suffixes"])
    tokenizer = make_tokenizer(cfg["tokenizer"])
    output.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(whole(output, replace_folder=True))
        temporary.mkdir()
        writers = {name: TokenWriter(temporary / f"{name}.npy", tokenizer.vocab_size) for name in SPLITS}
        for writer in writers.values():
            stack.callback(writer.close)
        for path in files:
            for document in read_documents(path, separator):
                writer = writers[split_of(document.digest, cfg["split_seed"], cfg["val_share"], cfg["test_share"])]
                for ids in tokenizer.encode(document):
                    writer.write(ids, ends=False)
                writer.write(np.array([tokenizer.end]), ends=True)
        splits = {name: writer.close() for name, writer in writers.items()}
        sizes = [path.stat().st_size for path in files]
        total = sum(writer.documents for writer in writers.values())
        if separator is not None and total <= sum(size > 0 for size in sizes):
            raise UserError(
                f"separator={cfg['separator']!r} divides none of the {len(files)} files in input={folder}: give what "
                "stands between their documents, or null."
            )
        for name, facts in splits.items():
            if facts["documents"] == 0:
                raise UserError(
                    f"the {name} split got none of the {total} documents in input={folder}: divide files into more "
                    "documents by separator, choose another split_seed, or larger shares."
                )
        about = {key: cfg[key] for key in ("suffixes", "separator", "split_seed", "val_share", "test_share")}
        meta = write_meta(
            temporary,
            tokenizer.vocab_size,
            splits,
            tokenizer=tokenizer.name,
            end=tokenizer.end,
            files=len(files),
            bytes=sum(sizes),
            **about,
        )
    return meta


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
