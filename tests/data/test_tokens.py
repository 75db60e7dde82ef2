"""Laws 2 and 3 for windows of tokens: every target once, for all devices, batches and interruptions."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tokens import COUNT, Fixed, stream
from torch import Tensor, nn

from lathe.data.synthetic import SyntheticTokens
from lathe.data.token_file import TokenFiles, TokenWriter, write_meta
from lathe.data.tokens import TokenDataModule, TokenLoader, Tokens
from lathe.errors import UserError
from lathe.tasks import LanguageModellingTask
from lathe.trainer import Trainer

pytestmark = pytest.mark.law2

Batch = tuple[Tensor, Tensor]


def loader(length: int = 4, tokens: Tokens | None = None, **settings: Any) -> TokenLoader:
    return TokenLoader(tokens or stream(), length, **{"batch_size": 6, **settings})


def joined(ranks: list[TokenLoader]) -> list[Batch]:
    """Return the next epoch's global batches of all ranks."""
    parts = zip(*ranks, strict=True)
    return [tuple(torch.cat(column) for column in zip(*batches, strict=True)) for batches in parts]  # type: ignore[misc]


def equal(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)
    )


def targets(batches: list[Batch]) -> Counter[int]:
    return Counter(y for _, ys in batches for y in ys.flatten().tolist() if y != -100)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("batch_size", [3, 64])
@pytest.mark.parametrize("length", [1, 4, 82])
def test_evaluation_counts_every_target_once(world: int, batch_size: int, length: int) -> None:
    ranks = [loader(length, batch_size=batch_size, rank=rank, world_size=world) for rank in range(world)]
    batches = joined(ranks)
    assert targets(batches) == Counter(range(1, COUNT))  # the first token has nothing before it
    for x, y in batches:
        assert x.shape == y.shape == (batch_size // world * world, length)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x[y != -100] + 1, y[y != -100])  # its own left neighbour
        assert int(x.max()) < COUNT


def test_evaluation_reads_the_same_context_whatever_the_batches() -> None:
    """A target's window begins at the same token for any batch size, so the loss does not depend on it."""
    rows = []
    for batch_size in (1, 5, 64):
        windows = [
            (*x, *y) for xs, ys in loader(batch_size=batch_size) for x, y in zip(xs.tolist(), ys.tolist(), strict=True)
        ]
        rows.append([window for window in windows if any(value != -100 for value in window[4:])])
    assert rows[0] == rows[1] == rows[2]
    assert len(rows[0]) == math.ceil((COUNT - 1) / 4)


@pytest.mark.parametrize("world", [1, 3])
def test_a_training_epoch_has_every_token_once_but_for_a_moving_rest(world: int) -> None:
    tokens = stream(6 * 4 * 3 + 3)  # three whole batches, and three tokens for which no window is left
    ranks = [loader(tokens=tokens, train=True, rank=rank, world_size=world) for rank in range(world)]
    rests = []
    for _ in range(4):
        batches = joined(ranks)
        seen = targets(batches)
        assert len(batches) == 3
        assert set(seen.values()) == {1}
        for x, y in batches:
            assert torch.equal((x + 1) % len(tokens.ids), y)  # circular: the first token follows the last
        rests.append(frozenset(set(range(len(tokens.ids))) - set(seen)))
        assert len(rests[-1]) == 3
    assert len(set(rests)) > 1


def test_training_batches_are_those_of_one_process_on_any_number_of_ranks() -> None:
    for world in (2, 3):
        one, ranks = loader(train=True), [loader(train=True, rank=rank, world_size=world) for rank in range(world)]
        for _ in range(3):
            assert equal(joined(ranks), list(one))


def test_sequences_are_kept_whole() -> None:
    """Independent sequences of length + 1 tokens: no window crosses a border, in training or evaluation."""
    tokens = Tokens(np.arange(35, dtype=np.uint16), sequences=True)
    for train in (True, False):
        batches = list(loader(tokens=tokens, batch_size=7 if train else 3, train=train))
        rows = [x for xs, ys in batches for x, y in zip(xs.tolist(), ys.tolist(), strict=True) if -100 not in y]
        assert sorted(rows) == [[5 * k, 5 * k + 1, 5 * k + 2, 5 * k + 3] for k in range(7)]
        assert targets(batches) == Counter(token for token in range(35) if token % 5)


def test_ids_of_32_bits() -> None:
    big = Tokens(np.arange(2**31, 2**31 + COUNT, dtype=np.uint32))
    assert targets(list(loader(tokens=big))) == Counter(range(2**31 + 1, 2**31 + COUNT))


def module(**settings: Any) -> TokenDataModule:
    return TokenDataModule(**{"source": Fixed(), "vocab_size": COUNT, "length": 4, "batch_size": 6, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 84}, r"data\.vocab_size=84 is not what the source Fixed has: set data\.vocab_size=83"),
        ({"length": 20}, r"data\.length=20 needs 21 tokens and the test split has 20: choose a smaller data\.length"),
    ],
)
def test_facts_that_do_not_fit_the_tokens_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        module(**settings).train_dataloader()


# Training on windows of tokens comes to the entropy.


class Bigram(nn.Module):
    """The simplest net that can learn the chain: logits of the next token for each token."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)
        nn.init.zeros_(self.table.weight)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.table(x)
        return logits


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*num_workers.*")
def test_a_table_of_pairs_reaches_the_entropy() -> None:
    source = SyntheticTokens(vocab_size=16, length=32, train_size=1200, test_size=400)
    data = TokenDataModule(source, source.vocab_size, length=32, batch_size=12)
    task = LanguageModellingTask(Bigram(16), optimizer=lambda net: torch.optim.Adam(net.parameters(), lr=0.1))
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=2, **dict.fromkeys(names, False))  # type: ignore[arg-type]
    trainer.fit(task, datamodule=data)
    (metrics,) = trainer.test(task, datamodule=data, verbose=False)
    assert source.entropy - 0.05 < metrics["test/loss"] < source.entropy + 0.05
    assert metrics["test/perplexity"] == pytest.approx(math.exp(metrics["test/loss"]), rel=1e-5)
    assert abs(metrics["test/accuracy"] - source.best_accuracy) < 0.02


# Token files on disk: read from a memory map; damaged, truncated and foreign ones are refused.


def write(folder: Path, vocab_size: int = 300, **counts: int) -> Path:
    folder.mkdir()
    splits = {}
    for number, (name, count) in enumerate({"train": 50, "val": 20, "test": 10, **counts}.items()):
        writer = TokenWriter(folder / f"{name}.npy", vocab_size)
        ids = np.random.default_rng(number).integers(vocab_size, size=count)
        writer.write(ids[:7], ends=False)
        writer.write(ids[7:], ends=True)
        splits[name] = writer.close()
    write_meta(folder, vocab_size, splits, tokenizer="test")
    return folder


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write(tmp_path / "tokens")


def source(folder: Path, **settings: Any) -> TokenFiles:
    return TokenFiles(str(folder.parent), folder.name, **settings)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_what_was_written_is_read_from_a_map(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    found = source(write(tmp_path / "tokens", vocab_size)).load()
    for number, (name, count) in enumerate({"train": 50, "val": 20, "test": 10}.items()):
        ids = found[name].ids
        assert isinstance(ids.base, np.memmap)
        assert ids.dtype == dtype
        assert not ids.flags.writeable
        assert np.array_equal(ids, np.random.default_rng(number).integers(vocab_size, size=count))
        assert np.array_equal(ids, np.load(tmp_path / "tokens" / f"{name}.npy", allow_pickle=False))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (Path.unlink, r"train\.npy is missing"),
        (cut, r"train\.npy is missing, or was cut or changed"),
        (lambda path: np.save(path, np.arange(50, dtype=np.int16)), r"train\.npy does not have the 50 tokens of meta"),
        (lambda path: (path.parent / "meta.json").unlink(), r"tokens holds no token files \(data\.source\.name\)"),
    ],
)
def test_a_missing_cut_or_other_file_is_refused(files: Path, harm: Any, says: str) -> None:
    harm(files / "train.npy")
    with pytest.raises(UserError, match=says):
        source(files).prepare()


@pytest.mark.parametrize("change", [{"format": "other"}, {"dtype": "O"}, {"splits": {}}])
def test_a_damaged_description_is_refused(files: Path, change: dict[str, Any]) -> None:
    meta = json.loads((files / "meta.json").read_text())
    (files / "meta.json").write_text(json.dumps(meta | change))
    with pytest.raises(UserError, match=r"meta\.json is not version 1 of what .*, or is damaged"):
        source(files).prepare()


def test_changed_bytes_are_found_when_asked(files: Path) -> None:
    source(files, verify=True).prepare()
    data = bytearray((files / "val.npy").read_bytes())
    data[-1] ^= 1
    (files / "val.npy").write_bytes(data)
    source(files).prepare()
    with pytest.raises(UserError, match=r"val\.npy differs from its SHA-256 in meta\.json"):
        source(files, verify=True).prepare()
