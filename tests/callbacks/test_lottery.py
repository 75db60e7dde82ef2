"""A ticket is pruned from trained weights and rewound to early ones; an interruption changes nothing."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lathe.callbacks import ExactResume
from lathe.callbacks.ema import EMA
from lathe.compression.pruning import make_masks
from lathe.compression.pruning.callback import Lottery
from lathe.optim.schedules import cosine


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))


class Recorder(Callback):
    """Records the state after each step, the next rate, the presence of momentum, and readiness."""

    def __init__(self, lottery: Lottery | None = None) -> None:
        self.lottery = lottery
        self.states: dict[int, dict[str, Tensor]] = {}
        self.rates: dict[int, float] = {}
        self.momenta: dict[int, bool] = {}
        self.ready: dict[int, bool] = {}

    def note(self, trainer: Any, pl_module: Any) -> None:
        step = trainer.global_step
        self.states[step] = {name: value.detach().clone() for name, value in pl_module.net.state_dict().items()}
        self.rates[step] = trainer.optimizers[0].param_groups[0]["lr"]
        self.momenta[step] = bool(trainer.optimizers[0].state)
        if self.lottery:
            self.ready[step] = self.lottery.ready(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.note(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.note(trainer, pl_module)


def task_of(tiny: SimpleNamespace) -> Any:
    class Scheduled(tiny.Task):
        """With a schedule, built as by lathe's tasks."""

        schedule_repeats = 1

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            total = int(self.trainer.estimated_stepping_batches) // self.schedule_repeats
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine(optimizer, total), "interval": "step"}}

    return Scheduled(net())


def fit(tiny: SimpleNamespace, lottery: Lottery, *more: Any, epochs: int = 3, **options: Any) -> tuple[Any, Recorder]:
    recorder, task = Recorder(lottery), task_of(tiny)
    trainer = tiny.trainer(ExactResume(0), lottery, *more, recorder, max_epochs=epochs)
    trainer.fit(task, tiny.Loader(), **options)
    return task, recorder


@pytest.mark.parametrize("rewind", [0, 0.5])
def test_rounds_prune_trained_weights_and_go_back_to_early_ones(tiny: SimpleNamespace, rewind: float) -> None:
    lottery = Lottery(sparsity=0.75, rounds=3, rewind=rewind)  # 18 steps: rounds begin at 0, 6 and 12
    task, recorder = fit(tiny, lottery)
    early = recorder.states[{0: 0, 0.5: 3}[rewind]]
    names, masks = ["0.weight", "3.weight"], {}
    for begins, sparsity in ((6, 0.5), (12, 0.75)):
        # The step's weights were pruned, but the recorder sees the rewound net: repeat the pruning from the masks'
        # choice.
        state = recorder.states[begins]
        zeros = {name: state[name] == 0 for name in names}
        assert sum(int(zero.sum()) for zero in zeros.values()) == round(sparsity * (24 + 64))
        for name, value in state.items():
            wanted = value if name not in names else torch.where(zeros[name], 0.0, early[name])
            assert torch.equal(value, wanted), name
            if name not in names:
                assert torch.equal(value, early[name]), name  # biases, BatchNorm's weights and statistics, the head
        for name in names:
            assert not masks or bool((masks[name] <= zeros[name]).all())  # nested
        masks = zeros
        for step in range(begins, min(begins + 6, 18)):
            assert all(bool((recorder.states[step][name][masks[name]] == 0).all()) for name in names)
    assert {name: bool(torch.equal(~lottery.masks[name], masks[name])) for name in names} == dict.fromkeys(names, True)
    assert lottery.saved == {}
    assert lottery.report() == {"lottery/sparsity": 0.75, "lottery/sparsity_net": 66 / 138}
    assert sum(p.numel() for p in task.net.parameters()) == 138


def test_each_round_is_a_whole_training_schedule_and_starts_without_momentum(tiny: SimpleNamespace) -> None:
    _, recorder = fit(tiny, Lottery(sparsity=0.75, rounds=3, rewind=0))
    rates = [recorder.rates[step] for step in range(18)]
    assert rates[:6] == rates[6:12] == rates[12:]
    assert rates[0] == 0.1
    assert rates[5] < 0.01
    assert [step for step, held in recorder.momenta.items() if not held] == [0, 6, 12]
    assert [step for step, word in recorder.ready.items() if word] == [13, 14, 15, 16, 17, 18]


def test_a_second_round_equals_a_plain_training_of_the_ticket(tiny: SimpleNamespace) -> None:
    """From the initial weights with masks; statistics, momentum and rates keep nothing of the first round."""
    lottery = Lottery(sparsity=0.6, rounds=2, rewind=0)
    task, _ = fit(tiny, lottery, epochs=2)

    class Ticket(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.apply(pl_module)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.apply(pl_module)

        @torch.no_grad()
        def apply(self, pl_module: Any) -> None:
            for name, mask in lottery.masks.items():
                pl_module.net.get_parameter(name).mul_(mask)

    plain = task_of(tiny)
    tiny.trainer(Ticket(), max_epochs=1).fit(plain, tiny.Loader())
    for name, value in task.net.state_dict().items():
        assert torch.equal(value, plain.net.state_dict()[name]), name


def test_the_average_starts_anew_and_stays_zero_where_masked(tiny: SimpleNamespace) -> None:
    lottery, ema = Lottery(sparsity=0.6, rounds=2, rewind=0), EMA(decay=0.9, warmup=False)
    task, recorder = fit(tiny, lottery, ema, epochs=2)
    average = recorder.states[6]
    for step in range(7, 13):
        average = {name: 0.9 * average[name] + 0.1 * value for name, value in recorder.states[step].items()}
    for name, mask in lottery.masks.items():
        shown = task.net.get_parameter(name)
        torch.testing.assert_close(shown, average[name])
        assert bool((shown[~mask] == 0).all())


def test_with_stages_the_schedule_goes_on_repeating(tiny: SimpleNamespace) -> None:
    lottery = Lottery(sparsity=0.5, rounds=2, rewind=0)
    lottery.window = (0.0, 0.5)
    _, recorder = fit(tiny, lottery, epochs=4)  # 24 steps: rounds begin at 0 and 6, the window ends at 12
    rates = [recorder.rates[step] for step in range(24)]
    assert rates[:6] == rates[6:12] == rates[12:18] == rates[18:]
    assert [step for step, held in recorder.momenta.items() if not held] == [0, 6]
    assert not torch.equal(recorder.states[12]["0.bias"], recorder.states[0]["0.bias"])


def test_the_pruned_are_the_smallest_of_the_trained(tiny: SimpleNamespace) -> None:
    """A plain run of one round's length, on the same schedule, ends where the first round ends."""
    plain = task_of(tiny)
    tiny.trainer(ExactResume(0), max_epochs=1).fit(plain, tiny.Loader())
    lottery = Lottery(sparsity=0.6, rounds=2, rewind=0)
    fit(tiny, lottery, epochs=2)
    trained = {name: plain.net.get_parameter(name).abs() for name in ("0.weight", "3.weight")}
    wanted = make_masks(trained, 0.6)
    assert all(torch.equal(lottery.masks[name], wanted[name]) for name in wanted)
