"""A ticket is pruned from trained weights and rewound to early ones, with the state of a fresh run."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from support.net_state import assert_same, copy_of
from torch import nn

from lathe.callbacks import ExactResume
from lathe.callbacks.ema import EMA
from lathe.compression.pruning import make_masks
from lathe.compression.pruning.callback import Lottery
from lathe.optim.schedules import cosine

NAMES = ["0.weight", "3.weight"]


def task_of(tiny: SimpleNamespace) -> Any:
    class Scheduled(tiny.Task):
        """With a schedule, built as by lathe's tasks."""

        schedule_repeats = 1

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            total = int(self.trainer.estimated_stepping_batches) // self.schedule_repeats
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine(optimizer, total), "interval": "step"}}

    torch.manual_seed(0)
    return Scheduled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2)))


def fit(tiny: SimpleNamespace, lottery: Lottery, *more: Any, epochs: int = 3) -> tuple[Any, SimpleNamespace]:
    """Return the task, and by step the state, the next rate, the presence of momentum, and readiness."""
    task, record = task_of(tiny), SimpleNamespace(states={}, rates={}, momentum={}, ready={})

    def note(trainer: Any, module: Any, *_: Any) -> None:
        step = trainer.global_step
        record.states[step] = copy_of(module.net)
        record.rates[step] = trainer.optimizers[0].param_groups[0]["lr"]
        record.momentum[step] = bool(trainer.optimizers[0].state)
        record.ready[step] = lottery.ready(trainer)

    recorder = LambdaCallback(on_train_start=note, on_train_batch_end=note)
    tiny.trainer(ExactResume(0), lottery, *more, recorder, max_epochs=epochs).fit(task, tiny.Loader())
    return task, record


@pytest.mark.parametrize(("rewind", "early"), [(0, 0), (0.5, 3)])
def test_rounds_prune_weights_go_back_to_early_ones_and_repeat_the_schedule(
    tiny: SimpleNamespace, rewind: float, early: int
) -> None:
    lottery = Lottery(sparsity=0.75, rounds=3, rewind=rewind)  # 18 steps: rounds begin at 0, 6 and 12
    _, record = fit(tiny, lottery)
    zeros = {name: torch.zeros_like(record.states[0][name], dtype=torch.bool) for name in NAMES}
    for begins, sparsity in ((6, 0.5), (12, 0.75)):
        state, before = record.states[begins], zeros
        zeros = {name: state[name] == 0 for name in NAMES}
        assert sum(int(zero.sum()) for zero in zeros.values()) == round(sparsity * (24 + 64))
        assert all(bool((before[name] <= zeros[name]).all()) for name in NAMES)
        expected = dict(record.states[early])  # biases, BatchNorm's weights and statistics, and the head too
        assert_same(state, expected | {name: expected[name].masked_fill(zeros[name], 0.0) for name in NAMES})
        for step in range(begins, begins + 6):
            assert all(bool((record.states[step][name][zeros[name]] == 0).all()) for name in NAMES)
    assert_same(lottery.masks, {name: ~zeros[name] for name in NAMES})
    assert lottery.saved == {}
    assert lottery.report() == {"lottery/sparsity": 0.75, "lottery/sparsity_net": 66 / 138}
    rates = [record.rates[step] for step in range(18)]
    assert rates[:6] == rates[6:12] == rates[12:]
    assert (rates[0], rates[5] < 0.01) == (0.1, True)
    assert [step for step, momentum in record.momentum.items() if not momentum] == [0, 6, 12]
    assert [step for step, ready in record.ready.items() if ready] == [13, 14, 15, 16, 17, 18]


def test_the_ticket_is_the_largest_trained_weights_and_trains_as_a_plain_net(tiny: SimpleNamespace) -> None:
    """From the initial weights; statistics, momentum and rates keep nothing of the first round."""
    lottery = Lottery(sparsity=0.6, rounds=2, rewind=0)
    task, _ = fit(tiny, lottery, epochs=2)
    first = task_of(tiny)
    tiny.trainer(ExactResume(0), max_epochs=1).fit(first, tiny.Loader())
    assert_same(lottery.masks, make_masks({name: first.net.get_parameter(name).abs() for name in NAMES}, 0.6))

    def apply(trainer: Any, module: Any, *_: Any) -> None:
        for name, mask in lottery.masks.items():
            module.net.get_parameter(name).data.mul_(mask)

    plain = task_of(tiny)
    ticket = LambdaCallback(on_train_start=apply, on_train_batch_end=apply)
    tiny.trainer(ticket, max_epochs=1).fit(plain, tiny.Loader())
    assert_same(task.net.state_dict(), plain.net.state_dict())


def test_the_average_restarts_and_stays_zero_where_masked(tiny: SimpleNamespace) -> None:
    lottery, ema = Lottery(sparsity=0.6, rounds=2, rewind=0), EMA(decay=0.9, warmup=False)
    task, record = fit(tiny, lottery, ema, epochs=2)
    average = record.states[6]
    for step in range(7, 13):
        average = {name: 0.9 * average[name] + 0.1 * value for name, value in record.states[step].items()}
    for name, mask in lottery.masks.items():
        torch.testing.assert_close(task.net.get_parameter(name), average[name])
        assert bool((task.net.get_parameter(name)[~mask] == 0).all())


def test_with_stages_the_schedule_continues_to_repeat(tiny: SimpleNamespace) -> None:
    lottery = Lottery(sparsity=0.5, rounds=2, rewind=0)
    lottery.window = (0.0, 0.5)
    _, record = fit(tiny, lottery, epochs=4)  # 24 steps: rounds begin at 0 and 6, the window ends at 12
    rates = [record.rates[step] for step in range(24)]
    assert rates[:6] == rates[6:12] == rates[12:18] == rates[18:]
    assert [step for step, momentum in record.momentum.items() if not momentum] == [0, 6]
    assert not torch.equal(record.states[12]["0.bias"], record.states[0]["0.bias"])
