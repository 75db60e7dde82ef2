"""What a checkpoint keeps of metrics under way: each rank's own, for their total on one rank would add up in another
order, and differ in the last digit.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lathe.tasks import logged


def sums(mine: Tensor, trainer: Trainer) -> list[list[float]]:
    """Every rank's sums [sums]; a collective."""
    rows = [mine] * trainer.world_size
    if trainer.world_size > 1:
        rows = [torch.empty_like(mine) for _ in rows]
        torch.distributed.all_gather(rows, mine)
    return [row.tolist() for row in rows]


def own_sums(saved: list[list[float]], trainer: Trainer, device: torch.device) -> Tensor:
    """This rank's part of what `sums` gave; on other devices than before, one rank goes on with the total."""
    rows = torch.tensor(saved, dtype=torch.float32, device=device)
    if len(rows) != trainer.world_size:
        rows = torch.cat((rows.sum(0, keepdim=True), torch.zeros_like(rows[:1]).expand(trainer.world_size - 1, -1)))
    return rows[trainer.global_rank].clone()


def logs(trainer: Trainer, task: LightningModule) -> list[dict[str, Any]]:
    """What `self.log` was given and has not reported yet, of each rank, after writing what is due; a collective."""
    connector = trainer._logger_connector
    if trainer.state.fn != "fit" or not hasattr(connector, "flush"):
        return []
    connector.flush()
    mine = logged.states(trainer, task)
    if trainer.world_size == 1:
        return [mine]
    each: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(each, mine)
    return each
