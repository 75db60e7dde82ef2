"""Several steps between two returns to Lightning are Lightning's own steps: every hook is called in its order, with its
counters, and the weights and logged values have the same digits.
"""

import random
import warnings
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from support.quiet import quiet_trainer
from support.ranks import on_ranks
from support.regression import trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

from lathe.data.foreign import share
from lathe.strategies import DDP
from lathe.tasks import ClassificationTask
from lathe.trainer import Trainer
from lathe.trainer.multi_step import HOOKS

CASES, BATCHES = 40, 12


class Log(DummyLogger):
    """Records its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


class Spy(Callback):
    """Records at each hook of a batch all that a callback could see."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, name: str, trainer: Any, module: Any, *args: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        values = [value.item() if isinstance(value, Tensor) else value for value in args if not callable(value)]
        self.seen.append(
            (
                name,
                [str(value) for value in values if not isinstance(value, torch.optim.Optimizer)],
                trainer.global_step,
                trainer.current_epoch,
                trainer.is_last_batch,
                module._current_fx_name,
                {key: value for key, value in loop.state_dict().items() if "progress" in key},
                [group["lr"] for group in trainer.optimizers[0].param_groups],
                {key: float(value) for key, value in trainer.callback_metrics.items()},
                {key: float(value) for key, value in trainer.progress_bar_metrics.items()},
                module.net[0].weight.detach().sum().item(),
            )
        )


def spying(name: str) -> Any:
    def hook(self: Spy, trainer: Any, module: Any, *args: Any) -> None:
        shown = [arg.get("loss") if isinstance(arg, dict) else arg for arg in args]
        self.note(name, trainer, module, *[arg for arg in shown if not isinstance(arg, (tuple, list))])

    return hook


VALIDATIONS = ("on_validation_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_end")
for _name in (*HOOKS, *VALIDATIONS, "on_train_epoch_start", "on_train_epoch_end"):
    setattr(Spy, _name, spying(_name))


class Stops(Callback):
    """Requests a stop inside an epoch."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.should_stop = True


class Module(LightningModule):
    """A LightningModule with the features that a case draws."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 3))
        self.case, self.own = case, []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if self.case["logs"]:
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        returns = self.case["returns"]
        if returns == "none" and batch_idx % 3 == 1:
            return None
        return {"loss": loss, "more": batch_idx} if returns == "dict" else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]), on_step=self.case["logs"], on_epoch=True)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.own.append(("val", batch_idx, self._current_fx_name))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.case["skips"] and batch_idx == 7 else None

    def on_after_backward(self) -> None:
        self.own.append(("after", self.trainer.global_step, self._current_fx_name))

    def configure_optimizers(self) -> Any:
        kinds = {
            "sgd": lambda: torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9),
            "adam": lambda: torch.optim.AdamW(self.parameters(), lr=0.01),
            "lbfgs": lambda: torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3),
        }
        optimizer: Any = kinds[self.case["optimizer"]]()
        if self.case["watched"]:
            optimizer.register_step_pre_hook(lambda *_: self.own.append(("pre", self.trainer.global_step)))
        if self.case["interval"] is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": self.case["interval"], "frequency": 2},
        }


class OwnStep(Module):
    """Does the optimizer's step itself."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.own.append(("step", batch_idx))
        optimizer.step(closure=optimizer_closure)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.own.append(("moved", len(batch)))
        return batch


def drawn(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    lbfgs = draw.random() < 0.1
    accumulate = 1 if lbfgs else draw.choice([1, 1, 2, 5])
    returns = "loss" if lbfgs else draw.choice(["loss", "loss", "dict", "none"])
    return {
        "logs": draw.random() < 0.4,
        "returns": returns,
        "skips": draw.random() < 0.15,
        "optimizer": "lbfgs" if lbfgs else draw.choice(["sgd", "adam"]),
        "watched": draw.random() < 0.2,
        "interval": draw.choice([None, "step", "epoch"]),
        "own": draw.random() < 0.2,
        "stop": draw.choice([None, None, None, 5]),
        "trainer": {
            "accumulate_grad_batches": accumulate,
            # torch can't clip where a step has left no gradient
            "gradient_clip_val": None if returns == "none" else draw.choice([None, 0.05]),
            "gradient_clip_algorithm": draw.choice([None, "value"]),
            "val_check_interval": draw.choice([1.0, 0.5, 5]),
            "check_val_every_n_epoch": draw.choice([1, 2]),
            "limit_train_batches": draw.choice([1.0, 7, 0.6]),
            "max_steps": draw.choice([-1, -1, 9]),
            "precision": draw.choice(["32-true", "bf16-mixed", "64-true"]),
            "log_every_n_steps": draw.choice([1, 2, 3]),
        },
    }


def batches(number: int = BATCHES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)) for _ in range(number)
    ]


class Loader:
    """Whose number of batches may not be known."""

    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


class Sized(Loader):
    def __len__(self) -> int:
        return len(self.data)


def run(case: dict[str, Any], per_call: int | None, loader: Any, folder: Any) -> dict[str, Any]:
    """Return the hooks, rows, weights and loop state of a run."""
    torch.manual_seed(3)
    spy, log = Spy(), Log()
    module = (OwnStep if case["own"] else Module)(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = quiet_trainer(
            spy,
            Stops(case["stop"]),
            max_epochs=2,
            logger=log,
            num_sanity_val_steps=0,
            default_root_dir=str(folder),
            steps_per_call=per_call,
            **case["trainer"],
        )
        trainer.fit(module, loader, Sized(batches(2)))
    return {
        "hooks": spy.seen,
        "own": module.own,
        "rows": [(step, {name: float(value) for name, value in row.items()}) for step, row in log.rows],
        "weights": [value.tolist() for value in module.state_dict().values()],
        "loops": trainer.fit_loop.state_dict(),
        "steps": trainer.global_step,
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(CASES))
def test_hooks_rows_weights_and_counters_are_those_of_lightnings_steps(seed: int, tmp_path: Any) -> None:
    case = drawn(seed)
    unsized = case["trainer"]["val_check_interval"] == 1.0 and seed % 4 == 0
    if unsized:
        case["trainer"] |= {"limit_train_batches": 1.0, "val_check_interval": 1.0}
    kind = Loader if unsized else Sized
    expected = run(case, 1, kind(batches()), tmp_path)
    assert expected["hooks"]
    for per_call in (None, random.Random(seed).choice([2, 3, 7, 100])):
        found = run(case, per_call, kind(batches()), tmp_path)
        for key, value in expected.items():
            assert found[key] == value, (key, case, per_call)


def plain_loop(case: dict[str, Any], samples: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The weights after two epochs in plain torch, where each step takes the mean over all its samples that count."""
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    size = case["batch"] * case["accumulate"]
    for _ in range(2):
        for first in range(0, len(samples), size):
            x, y = zip(*(sample for sample in samples[first : first + size] if not dropped(sample)), strict=True)
            optimizer.zero_grad()
            F.cross_entropy(net(torch.stack(x)), torch.stack(y)).backward()
            if case["clip"]:
                nn.utils.clip_grad_norm_(net.parameters(), case["clip"])
            optimizer.step()
    return torch.cat([value.detach().flatten() for value in net.parameters()])


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def dropped(sample: tuple[Tensor, Tensor]) -> bool:
    return bool(sample[0][0] > 9)


def collate(samples: list[tuple[Tensor, Tensor]]) -> Any:
    return default_collate([sample for sample in samples if not dropped(sample)])


class Uneven(LightningDataModule):
    """Batches in stored order with a collate function that drops samples."""

    def __init__(self, samples: list[Any], batch: int) -> None:
        super().__init__()
        self.samples, self.batch = samples, batch

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples, self.batch, collate_fn=collate)  # type: ignore[arg-type]


class Plain(LightningModule):
    """A user's module: only the length of a batch is known."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def uneven(seed: int) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]:
    draw = random.Random(seed)
    case = {
        "task": seed % 2 == 0,
        "batch": draw.choice([4, 8]),
        "accumulate": draw.choice([1, 2, 3, 5, 30]),
        "clip": draw.choice([None, 0.3]),
        "calls": draw.choice([None, 1]),
    }
    count = 4 * draw.randint(3, 12)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (count,), generator=generator)
    for odd in range(1, count, 2):  # so that each replica keeps a sample of each batch
        if draw.random() < 0.4:
            x[odd, 0] = 10
        elif draw.random() < 0.4:
            y[odd] = -100 if case["task"] else y[odd]
    return case, list(zip(x, y, strict=True))


def trained(seed: int, devices: int = 1) -> Tensor:
    case, samples = uneven(seed)
    data, net = Uneven(samples, case["batch"]), linear()
    share(data, 0)
    module = ClassificationTask(net, lambda net: torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9))
    run, _ = trainer(
        max_epochs=2,
        precision="64-true",
        accumulate_grad_batches=case["accumulate"],
        gradient_clip_val=case["clip"],
        use_distributed_sampler=False,
        steps_per_call=case["calls"],
        **({"devices": 2, "strategy": DDP()} if devices == 2 else {}),
    )
    run.fit(module if case["task"] else Plain(net), datamodule=data)
    return torch.cat([value.detach().flatten() for value in net.parameters()])


SEEDS = range(10)


def trained_on_two(rank: int) -> list[Tensor]:
    warnings.simplefilter("ignore")
    return [trained(seed, devices=2) for seed in SEEDS]


@pytest.mark.filterwarnings("ignore")
def test_each_step_takes_the_mean_over_its_samples_that_count() -> None:
    """However many of them its batches and replicas have, and however many batches the last step of an epoch has."""
    both = on_ranks(trained_on_two)
    for seed in SEEDS:
        expected = plain_loop(*uneven(seed))
        for found in (trained(seed), *(rank[seed] for rank in both)):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13, msg=str(uneven(seed)[0]))


@pytest.mark.filterwarnings("ignore")
def test_full_windows_of_equal_batches_have_the_digits_of_lightnings_own_loop() -> None:
    digits = []
    for kind in (Trainer, lightning.pytorch.Trainer):
        torch.manual_seed(0)
        module = Plain(nn.Linear(4, 3))
        run, _ = trainer(max_epochs=2, accumulate_grad_batches=3, kind=kind)
        run.fit(module, Sized(batches()))
        digits.append([value.tolist() for value in module.parameters()])
    assert digits[0] == digits[1]
