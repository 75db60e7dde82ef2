"""Laws 2 and 3 for windows of tokens: every target once, for all devices, batches and interruptions."""

import math
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from support.tokens import COUNT, Fixed, stream
from torch import Tensor

from lathe.data.tokens import TokenDataModule, TokenLoader, Tokens
from lathe.errors import UserError

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


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [3, 6, 64])
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


@pytest.mark.parametrize("world", [1, 2, 3])
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


def test_epochs_differ_and_depend_on_seed_and_epoch_alone() -> None:
    one, same, other = loader(train=True, seed=1), loader(train=True, seed=1), loader(train=True, seed=2)
    first, second = list(one), list(one)
    next(iter(same))  # an epoch that is left early does not shift the next
    assert equal(list(same), second)
    assert not equal(first, second)
    assert not equal(list(other), first)
    state = torch.get_rng_state()
    list(one)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_a_state_continues_mid_epoch_with_the_same_batches(at: int) -> None:
    """The batches of two epochs (three in each), resumed from the state after `at` of them."""

    def two(it: TokenLoader) -> list[Batch]:
        return [batch for _ in range(2) for batch in it]

    expected, begun, fresh = two(loader(train=True)), loader(train=True), loader(train=True)
    if at > 3:
        list(begun)
    for _ in islice(begun, at if at <= 3 else at - 3):
        pass
    state = begun.state_dict()
    assert state == ({"epoch": 0, "batch": at} if at <= 3 else {"epoch": 1, "batch": at - 3})
    fresh.load_state_dict(state)
    rest = [*fresh] if at >= 3 else two(fresh)
    assert equal(rest, expected[at:])


def test_unshuffled_training_keeps_the_stored_order() -> None:
    batches = list(loader(train=True, shuffle=False))
    assert [y for _, ys in batches for y in ys.flatten().tolist()] == list(range(1, 6 * 4 * 3 + 1))


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


def test_the_data_module_makes_every_loader() -> None:
    it = module(eval_batch_size=5)
    it.setup()
    assert [len(it.train_dataloader()), len(it.val_dataloader()), len(it.test_dataloader())] == [3, 2, 1]
    assert it.train_dataloader() is it.train_dataloader()
    assert targets(list(it.eval_loader("train"))) == Counter(range(1, COUNT))
    it.test_split = "val"
    assert targets(list(it.test_dataloader())) == Counter(range(1, 30))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 84}, r"data\.vocab_size=84 is not what the source Fixed has: set data\.vocab_size=83"),
        ({"length": 20}, r"data\.length=20 needs 21 tokens and the test split has 20: choose a smaller data\.length"),
        ({"batch_size": 21}, r"data\.batch_size=21 cannot be filled from 20 training samples"),
    ],
)
def test_facts_that_do_not_fit_the_tokens_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        module(**settings).train_dataloader()
