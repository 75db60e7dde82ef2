"""Sample selection: each sample in turn, then those with the largest losses and some random ones."""

import random

import pytest
import torch
from torch import Tensor

from lathe.data.order import Selection
from lathe.errors import UserError

N = 200


def begun(share: float = 0.25, hardest: float = 0.6, passes: int = 2, n: int = N) -> Selection:
    selection = Selection(share, hardest, passes)
    selection.begin(n, 1)
    return selection


def trained(selection: Selection, epochs: range, losses: Tensor, seed: int = 0) -> list[Tensor]:
    """Return the orders of these epochs, each fully trained."""
    orders = []
    for epoch in epochs:
        orders.append(selection.order(seed, epoch))
        selection.note(orders[-1], losses[orders[-1]])
    return orders


@pytest.mark.parametrize("seed", range(10))
def test_passes_come_first_and_losses_decide_then(seed: int) -> None:
    rng = random.Random(seed)
    share, hardest, passes, n = rng.uniform(0.05, 0.95), rng.random(), rng.randint(1, 3), rng.randint(5, 90)
    selection, losses = begun(share, hardest, passes, n), torch.randperm(n).float()
    count = selection.count(n, 1)
    first = n * passes // count  # epochs that depend on turns only
    orders = trained(selection, range(first + 1), losses, seed)
    assert all(len(order.unique()) == count for order in orders), "no sample twice in an epoch"
    turns = torch.stack([order.bincount(minlength=n) if len(order) else order for order in orders]).cumsum(0)
    assert first == 0 or int(turns[first - 1].max()) <= passes
    assert int(turns[first].min()) >= passes
    order, hard = selection.order(seed, first + 1), round(count * hardest)
    assert len(order.unique()) == count
    assert set(losses.argsort(descending=True)[:hard].tolist()) <= set(order.tolist())


def test_the_rest_is_drawn_in_each_epoch() -> None:
    selection, losses = begun(), torch.arange(N).float()
    trained(selection, range(8), losses)
    orders = trained(selection, range(8, 40), losses)
    hard = set(range(N - 30, N))
    easy = [set(order.tolist()) - hard for order in orders]
    assert all(len(part) == 20 for part in easy)
    assert len({frozenset(part) for part in easy}) == len(easy)
    assert len(set.union(*easy)) > 160, "of 170, in 32 draws of 20"
    assert not torch.equal(orders[0][:10].sort().values, orders[0].sort().values[-10:]), "the order is no ranking"


def test_it_resumes_within_an_epoch() -> None:
    whole, losses = begun(), torch.arange(N).float().sin()
    trained(whole, range(9), losses)
    order = whole.order(0, 9)
    whole.note(order[:20], losses[order[:20]] + 1)
    state = whole.state()
    rest = (order[20:], losses[order[20:]] + 2)
    whole.note(*rest)
    for begins in (0, 1, 2):  # a loader may be built before the checkpoint is read, after it, or twice
        again = begun() if begins == 0 else Selection(0.25, 0.6, 2)
        again.restore(state)
        for _ in range(begins):
            again.begin(N, 1)
        assert torch.equal(again.order(0, 9), order)
        again.note(*rest)
        assert torch.equal(again.order(0, 10), whole.order(0, 10))


def test_processes_bring_together_what_each_has_seen() -> None:
    alone, ranks, losses = begun(), [begun(), begun()], torch.arange(N).float().cos()
    for epoch in range(12):
        order = alone.order(3, epoch)
        alone.note(order, losses[order] + epoch)
        for rank, own in enumerate(ranks):
            mine = own.order(3, epoch)
            assert torch.equal(mine, order)
            own.note(mine[rank::2], losses[mine[rank::2]] + epoch)
        told = [(own.losses.clone(), own.turns.clone()) for own in ranks]
        for own in ranks:
            own.merge(told)
            assert torch.equal(own.losses, alone.losses)
            assert torch.equal(own.turns, alone.turns)


def test_a_checkpoint_of_other_data_or_another_share_is_refused() -> None:
    with pytest.raises(UserError, match=r"has 201 training samples and .* there are 200 and 50 now"):
        begun().restore(begun(n=N + 1).state())
    other = begun(share=0.5)
    other.order(0, 0)
    with pytest.raises(UserError, match=r"and 100 in an epoch, and there are 200 and 50 now: use the same data"):
        begun().restore(other.state())


def test_an_epoch_is_whole_batches() -> None:
    selection = Selection(0.3, 1.0, 1)
    selection.begin(N, 25)
    assert [selection.count(N, size) for size in (1, 25, 32, 60, 61)] == [60, 50, 32, 60, 60]
    orders = trained(selection, range(5), torch.arange(N).float())
    assert [len(order) for order in orders] == [50] * 5
    assert sorted(torch.cat(orders[:4]).tolist()) == list(range(N))
    assert sorted(orders[4].tolist()) == list(range(150, N))
