"""Our loops give the weights of Lightning's own, and each step takes the mean over its samples that count."""

import random
import warnings
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from support.ranks import on_ranks
from support.regression import trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

from lathe.data.external import share
from lathe.strategies import DDP
from lathe.tasks import ClassificationTask
from lathe.trainer import Trainer


class Module(LightningModule):
    """A user's module with the features that a case draws; it records its hooks."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 3))
        self.case, self.own = case, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if self.case["logs"]:
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        if self.case["returns"] == "none" and batch_idx % 3 == 1:
            return None
        return {"loss": loss, "more": batch_idx} if self.case["returns"] == "dict" else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))
        self.own.append(("val", batch_idx, self._current_fx_name))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.case["skips"] and batch_idx == 7 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.own.append(("end", self.trainer.global_step, self.trainer.is_last_batch))
        self.trainer.should_stop = self.trainer.global_step == self.case["stop"]

    def configure_optimizers(self) -> Any:
        kinds = {
            "sgd": lambda: torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9),
            "adam": lambda: torch.optim.AdamW(self.parameters(), lr=0.01),
            "lbfgs": lambda: torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3),
        }
        optimizer: Any = kinds[self.case["optimizer"]]()
        optimizer.register_step_pre_hook(lambda *_: self.own.append(("pre", self.trainer.global_step)))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        config = {"scheduler": scheduler, "interval": self.case["interval"], "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": config}


def drawn(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    returns = draw.choice(["loss", "dict", "none"])
    return {
        "logs": draw.random() < 0.4,
        "returns": returns,
        "skips": draw.random() < 0.2,
        "optimizer": draw.choice(["sgd", "adam"] if returns == "none" else ["sgd", "adam", "lbfgs"]),
        "interval": draw.choice(["step", "epoch"]),
        "stop": draw.choice([None, None, 5]),
        "trainer": {
            # torch can't clip where a step has left no gradient
            "gradient_clip_val": None if returns == "none" else draw.choice([None, 0.05]),
            "gradient_clip_algorithm": draw.choice([None, "value"]),
            "val_check_interval": draw.choice([1.0, 0.5, 5]),
            "check_val_every_n_epoch": draw.choice([1, 2]),
            "limit_train_batches": draw.choice([1.0, 7, 0.6]),
            "max_steps": draw.choice([-1, -1, 9]),
            "precision": draw.choice(["32-true", "bf16-mixed", "64-true"]),
        },
    }


def batches(number: int = 12) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)) for _ in range(number)
    ]


class Sized:
    """A loader of stored batches; Lightning would take a list for several loaders."""

    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Any:
        return iter(self.data)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(6))
def test_hooks_and_weights_are_those_of_lightnings_own_loop(seed: int) -> None:
    case, found = drawn(seed), []
    for kind in (Trainer, lightning.pytorch.Trainer):
        torch.manual_seed(3)
        module = Module(case)
        run, _ = trainer(max_epochs=2, kind=kind, **case["trainer"])
        run.fit(module, Sized(batches()), Sized(batches(2)))
        weights = [value.tolist() for value in module.state_dict().values()]
        found.append({"own": module.own, "weights": weights, "steps": run.global_step})
    assert found[0] == found[1], case


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


SEEDS = range(4)


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
