"""Documents under a token budget: every target once, equal batches on any ranks, exact positions, packing."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support.documents import END, Fixed, join, lengths, loader, module, same
from torch.nn import functional as F

from lathe.data.token_file import TokenFiles, TokenWriter, write_meta
from lathe.data.tokens import DocumentDataModule
from lathe.errors import UserError
from lathe.tasks.language_modelling import LanguageModellingTask


def test_a_batch_holds_whole_documents_after_an_end_token() -> None:
    data = module(3, 2, max_batch_size=2)
    x, y, count = next(iter(data.train_dataloader()))
    rows = sorted(zip(x.tolist(), y.tolist(), strict=True))
    assert rows == [([END, 1, 2], [1, 2, END]), ([END, 4, END], [4, END, -100])]
    assert count.item() == 5
    assert count.dim() == 0


@pytest.mark.parametrize("growth", [1.0, 1.1, None])
@pytest.mark.parametrize(("max_tokens", "max_batch_size"), [(60, 16), (1000, 7), (100000, 100000)])
def test_no_batch_is_over_the_budget_and_none_is_left_out(
    growth: float | None, max_tokens: int, max_batch_size: int
) -> None:
    feed = loader(max_tokens=max_tokens, max_batch_size=max_batch_size, growth=growth)
    for _ in range(2):
        batches = list(feed)
        assert all(x.numel() <= max_tokens and len(x) <= max_batch_size for x, *_ in batches)
        targets = torch.cat([y[y > 0] for _, y, _ in batches])
        assert len(targets.unique()) == len(targets) == sum(lengths()) - 300
        assert sum((y == END).sum() for _, y, _ in batches) == 300
        assert len(batches) == len(feed)


def test_the_number_of_batches_is_the_same_in_every_epoch_and_their_content_is_not() -> None:
    feed = loader()
    epochs = [list(feed) for _ in range(4)]
    assert {len(epoch) for epoch in epochs} == {len(feed)}
    assert len({tuple(epoch[0][1].flatten().tolist()) for epoch in epochs}) == 4
    members = [{frozenset(batch) for batch in (b.tolist() for b in feed.global_batches(e))} for e in (0, 1)]
    assert len(members[0] & members[1]) < len(feed) / 4  # the composition of batches changes too


def test_buckets_waste_far_less_than_batches_of_any_lengths() -> None:
    none, some, least = (
        1 - sum(lengths()) / sum(y.numel() for _, y, _ in loader(growth=growth)) for growth in (None, 1.1, 1.0)
    )
    assert none > 0.35
    assert least <= some < 0.07


@pytest.mark.parametrize(("world", "train"), [(2, True), (3, True), (3, False)])
def test_ranks_together_see_the_batches_of_one_process(world: int, train: bool) -> None:
    one, ranks = loader(train=train), [loader(rank, world, train) for rank in range(world)]
    for _ in range(2):
        whole = [(x, y) for x, y, *_ in one]
        parts = list(zip(*ranks, strict=True))
        assert same([join(part) for part in parts], whole)
        assert all(len({tuple(piece[0].shape) for piece in part}) == 1 for part in parts)
        if train:
            counts = [(y >= 0).sum() for _, y in whole]
            assert all(piece[2] == count for part, count in zip(parts, counts, strict=True) for piece in part)


def test_evaluation_counts_every_target_once() -> None:
    targets = torch.cat([y[y != -100] for _, y in loader(train=False)])
    assert sorted(targets.tolist()) == sorted(Fixed(*lengths()).load()["train"].ids.tolist())


def test_fewer_documents_than_ranks_leave_ranks_without_targets() -> None:
    ranks = [loader(rank, 3, source=Fixed(4)) for rank in range(3)]
    batches = [next(iter(rank)) for rank in ranks]
    assert [int((y != -100).sum()) for _, y, _ in batches] == [4, 0, 0]
    assert {x.shape for x, *_ in batches} == {(1, 4)}


@pytest.mark.parametrize("interrupted", [5, 24])
def test_resume_continues_with_the_next_batch(interrupted: int) -> None:
    whole = [batch for feed in [loader()] for _ in range(3) for batch in feed]
    first, second = loader(), loader()
    head = list(islice((batch for _ in range(3) for batch in first), interrupted))
    second.load_state_dict(first.state_dict())
    tail = [batch for _ in range(4) for batch in second][: len(whole) - interrupted]
    assert same(head + tail, whole)
    assert second.state_dict().keys() == {"epoch", "batch"}


def test_multiples_round_the_shape_and_keep_the_budget() -> None:
    feed = loader(pad_multiple=8, row_multiple=4)
    for x, y, count in feed:
        assert x.shape[0] % 4 == x.shape[1] % 8 == 0
        assert count == (y != -100).sum()
        assert (y != -100).any(1).sum() * x.shape[1] <= 400


def test_long_cut_keeps_the_beginning_and_counts_what_it_took() -> None:
    data = module(70, 10, long="cut", length=64)
    targets = torch.cat([y[y != -100] for _, y in data.eval_loader("val")])
    assert sorted(targets.tolist()) == sorted([*range(1, 65), *range(71, 80), END])
    assert data.cut_tokens == {"train": 6, "val": 6, "test": 6}


def test_split_makes_pieces_that_go_on_where_the_last_one_ended() -> None:
    data = module(5, 9, long="split", length=4, max_batch_size=1)
    rows = sorted((y[y != -100].tolist(), x[y != -100].tolist()) for x, y in data.eval_loader("val"))
    targets, inputs = zip(*rows, strict=True)
    assert list(targets) == [[END], [END], [1, 2, 3, 4], [6, 7, 8, 9], [10, 11, 12, 13]]
    assert sorted(inputs) == [[END, 1, 2, 3], [END, 6, 7, 8], [4], [9, 10, 11, 12], [13]]
    assert set(data.cut_tokens.values()) == {0}


@pytest.mark.parametrize(
    ("of", "settings", "names"),
    [
        ((5, 70, 9), {}, r"data\.length=64 .*document 1"),
        ((5, 50, 9), {"max_tokens": 49}, r"data\.max_tokens=49: .*at least 50"),
        ((5, 5), {"vocab_size": 3}, r"data\.vocab_size=3 .*data\.vocab_size=11"),
    ],
)
def test_budgets_that_are_too_small_are_refused(of: tuple[int, ...], settings: dict[str, Any], names: str) -> None:
    with pytest.raises(UserError, match=names):
        module(*of, **settings).setup()


def test_documents_of_token_files_are_read_by_their_own_end(tmp_path: Path) -> None:
    meta = {}
    for name, tokens in Fixed(5, 6).load().items():
        writer = TokenWriter(tmp_path / f"{name}.npy", 12)
        writer.write(tokens.ids, ends=True)
        meta[name] = writer.close()
    write_meta(tmp_path, 12, meta, end=END)
    data = DocumentDataModule(TokenFiles("", str(tmp_path)), 12, 64, 400, 16)
    data.prepare_data()
    assert sorted(int((row != -100).sum()) for _, y in data.eval_loader("test") for row in y) == [5, 6]


def tiny() -> LanguageModellingTask:
    torch.manual_seed(0)
    return LanguageModellingTask(
        torch.nn.Sequential(
            torch.nn.Embedding(1 + sum(lengths()), 4),
            torch.nn.Linear(4, 8),
            torch.nn.Tanh(),
            torch.nn.Linear(8, 1 + sum(lengths())),
        )
    )


def test_the_loss_is_the_mean_over_the_global_batchs_targets() -> None:
    task, (x, y, count) = tiny(), next(iter(loader()))
    ours = task.losses(task.net(x), (x, y, count))["cross_entropy"]
    torch.testing.assert_close(ours, F.cross_entropy(task.net(x).flatten(0, 1), y.flatten()))
