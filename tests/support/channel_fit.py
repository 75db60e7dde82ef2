"""A small residual net trained for 12 steps on this process's shard, for the tests of channel removal."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule

from lathe.nets import CifarResNet
from lathe.tasks import ClassificationTask
from support.quiet import Batches, quiet_trainer

STEPS = 12


class Data(LightningDataModule):
    """The same batches in every epoch; rank r of n sees every n-th sample."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            (
                torch.randn(16, 1, 8, 8, generator=generator)[rank::world],
                torch.randint(3, (16,), generator=generator)[rank::world],
            )
            for _ in range(6)
        ]

    def train_dataloader(self) -> Any:
        return Batches(self.batches)

    val_dataloader = train_dataloader


def task() -> ClassificationTask:
    torch.manual_seed(0)
    net = CifarResNet(depth=8, width=8, in_channels=1, num_classes=3)
    return ClassificationTask(
        net, lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    )


def fit(
    *callbacks: Callback, module: Any = None, data: Any = None, resume: Any = None, **options: Any
) -> ClassificationTask:
    module = module or task()
    defaults: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    trainer = quiet_trainer(*callbacks, **{**defaults, **options})
    trainer.fit(module, datamodule=data or Data(), ckpt_path=resume, weights_only=True)
    return module
