"""Text to tokens and back: lossless, splits that depend on contents only, and no partial files."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.runs import config

from lathe.data import token_file
from lathe.data.token_file import Bytes, HuggingFace, TokenFiles, prepare, split_of
from lathe.errors import UserError

SPLITS = ("train", "val", "test")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """40 documents of some kilobytes with multi-byte characters, in two folders; and files to ignore."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "corpus"
    (folder / "inner").mkdir(parents=True)
    words = ["naïve", "shard", "日本語", "stage\n", "loss,", "\t", "mesh"]
    for number in range(40):
        name = f"inner/{number}.md" if number % 3 else f"{number}.TXT"
        (folder / name).write_bytes(" ".join(rng.choice(words, size=rng.integers(1, 400))).encode())
    (folder / "empty.txt").touch()
    (folder / "image.png").write_bytes(b"\x89PNG")
    (folder / ".hidden.txt").write_text("secret")
    (folder / ".git").mkdir()
    (folder / ".git" / "notes.md").write_text("secret")
    return folder


def settings(corpus: Path, **changes: Any) -> dict[str, Any]:
    cfg = config(f"input={corpus}", f"paths.data_dir={corpus.parent}", name="prepare_tokens")
    return cfg | {"val_share": 0.2, "test_share": 0.2} | changes


def documents(folder: Path, end: int = 256) -> dict[str, list[list[int]]]:
    """Return the ids of each document of each split."""
    found = {}
    for name, tokens in TokenFiles(str(folder.parent), folder.name).load().items():
        ends = np.flatnonzero(tokens.ids == end)
        assert ends[-1] == len(tokens.ids) - 1
        found[name] = [tokens.ids[a + 1 : b].tolist() for a, b in pairwise([-1, *ends.tolist()])]
    return found


def texts(corpus: Path) -> list[bytes]:
    paths = [
        path for path in corpus.rglob("*") if path.suffix.lower() in (".txt", ".md") and "/." not in path.as_posix()
    ]
    return [path.read_bytes() for path in paths if path.stat().st_size]


def test_bytes_decode_to_the_text(corpus: Path) -> None:
    meta = prepare(settings(corpus))
    found = documents(corpus.parent / "tokens")
    assert sorted(bytes(ids) for split in found.values() for ids in split) == sorted(texts(corpus))
    assert {name: len(split) for name, split in found.items()} == {
        name: meta["splits"][name]["documents"] for name in SPLITS
    }
    assert (meta["vocab_size"], meta["dtype"], meta["tokenizer"], meta["files"]) == (257, "<u2", "bytes", 41)
    assert meta["bytes"] == sum(map(len, texts(corpus)))
    assert sum(meta["splits"][name]["tokens"] for name in SPLITS) == meta["bytes"] + 40
    assert json.loads((corpus.parent / "tokens" / "meta.json").read_text()) == meta


def test_pieces_change_nothing(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files larger than one read, as for files larger than memory; also with a separator across pieces."""
    whole = prepare(settings(corpus))
    divided = prepare(settings(corpus, output="divided", separator="日本語 "))
    monkeypatch.setattr(token_file, "PIECE", 7)
    assert prepare(settings(corpus, output="again")) == whole
    assert prepare(settings(corpus, output="divided_again", separator="日本語 ")) == divided
    assert sum(facts["documents"] for facts in divided["splits"].values()) > 200


def test_a_separator_of_lines_can_be_typed(corpus: Path) -> None:
    meta = prepare(settings(corpus, separator="\\n"))
    lines = [line for words in texts(corpus) for line in words.split(b"\n") if line]
    assert sorted(bytes(ids) for split in documents(corpus.parent / "tokens").values() for ids in split) == sorted(
        lines
    )
    assert sum(facts["documents"] for facts in meta["splits"].values()) == len(lines)


def test_splits_follow_from_contents_and_seed(corpus: Path) -> None:
    prepare(settings(corpus))
    first = documents(corpus.parent / "tokens")
    moved = corpus.rename(corpus.parent / "moved")
    for path in list(moved.glob("*.TXT")):
        path.rename(path.with_name(f"renamed_{path.name}"))
    (moved / "new.txt").write_text("one more document")
    (moved / "copy.txt").write_bytes((moved / "inner" / "1.md").read_bytes())
    prepare(settings(moved, output="later"))
    later = documents(moved.parent / "later")
    for name in SPLITS:  # each document keeps its split, and its copy has the same
        assert {tuple(ids) for ids in first[name]} <= {tuple(ids) for ids in later[name]}
    assert sum(map(len, later.values())) == 42
    assert len({tuple(ids) for split in later.values() for ids in split}) == 41
    prepare(settings(moved, output="other", split_seed=1))
    assert documents(moved.parent / "other") != later


def test_an_existing_output_is_kept_unless_asked(corpus: Path) -> None:
    prepare(settings(corpus))
    with pytest.raises(UserError, match=r"output=.*tokens is there already: give overwrite=true"):
        prepare(settings(corpus))
    (corpus / "0.TXT").unlink()
    assert prepare(settings(corpus, overwrite=True))["files"] == 40
    assert sum(map(len, documents(corpus.parent / "tokens").values())) == 39
    (corpus.parent / "mine").mkdir()
    with pytest.raises(UserError, match=r"output=.*mine is there already: it holds no token files; choose another"):
        prepare(settings(corpus, output="mine", overwrite=True))
    assert sorted(path.name for path in corpus.parent.iterdir()) == ["corpus", "mine", "tokens"]


def test_a_failure_leaves_nothing_and_keeps_what_was_there(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(settings(corpus))
    before = documents(corpus.parent / "tokens")
    seventh = (corpus / "inner" / "7.md").read_bytes()

    def fail(self: Bytes, document: bytes) -> Iterator[Any]:
        if document == seventh:
            raise OSError("disk")
        yield from ()

    monkeypatch.setattr(Bytes, "encode", fail)
    with pytest.raises(OSError, match="disk"):
        prepare(settings(corpus, overwrite=True))
    assert sorted(path.name for path in corpus.parent.iterdir()) == ["corpus", "tokens"]
    assert documents(corpus.parent / "tokens") == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": "nowhere"}, "input=nowhere has no files that end in"),
        ({"val_share": 0.5, "test_share": 0.5}, r"val_share=0\.5 and test_share=0\.5 leave nothing to train on"),
    ],
)
def test_what_cannot_be_is_refused(corpus: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare(settings(corpus, **changes))
    assert sorted(path.name for path in corpus.parent.iterdir()) == ["corpus"]


@pytest.fixture
def tokenizer(corpus: Path) -> Path:
    """A small byte-level BPE in the format of a Hugging Face tokenizer.json."""
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    backend.train_from_iterator((path.read_text() for path in sorted(corpus.rglob("*.md"))), trainer)
    folder = corpus.parent / "bpe"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    return folder


def test_a_hugging_face_tokenizer(corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (corpus / "quote.txt").write_text("a text that names <|endoftext|> itself\r\n")
    meta = prepare(settings(corpus, tokenizer=str(tokenizer)))
    backend = HuggingFace(str(tokenizer / "tokenizer.json"))
    assert (meta["vocab_size"], meta["end"], backend.end) == (backend.vocab_size, 0, 0)
    found = documents(corpus.parent / "tokens", end=0)
    decoded = [backend._backend.decode(ids).encode() for split in found.values() for ids in split]
    assert sorted(decoded) == sorted(texts(corpus))
    assert sum(meta["splits"][name]["tokens"] for name in SPLITS) < meta["bytes"] / 2
    # pieces end at line ends: the text is the same, and here the ids too
    monkeypatch.setattr(token_file, "PIECE", 50)
    prepare(settings(corpus, tokenizer=str(tokenizer), output="again"))
    again = [
        backend._backend.decode(ids).encode()
        for split in documents(corpus.parent / "again", end=0).values()
        for ids in split
    ]
    assert sorted(again) == sorted(decoded)


def test_a_tokenizer_without_an_end_gets_one(tokenizer: Path) -> None:
    path = tokenizer / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<|other|>"))
    backend = HuggingFace(str(path))
    assert backend.end == backend.vocab_size - 1 == max(backend._backend.get_vocab().values()) + 1


def test_text_that_is_not_utf8_is_refused_for_a_tokenizer_of_text(corpus: Path, tokenizer: Path) -> None:
    (corpus / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(
        UserError, match=r"latin\.txt is not UTF-8 text: convert it, leave it out by suffixes, or use tokenizer=bytes"
    ):
        prepare(settings(corpus, tokenizer=str(tokenizer)))


def test_shares_have_the_requested_size() -> None:
    drawn = [split_of(number.to_bytes(4, "little"), 0, 0.1, 0.3) for number in range(10000)]
    assert [round(drawn.count(name) / 10000, 2) for name in SPLITS] == pytest.approx([0.6, 0.1, 0.3], abs=0.015)
    assert split_of(b"x", 0, 0.1, 0.3) == split_of(b"x", 0, 0.1, 0.3)
