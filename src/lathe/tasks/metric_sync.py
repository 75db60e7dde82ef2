"""Metrics in progress, across processes and in checkpoints.

A checkpoint keeps the sums of each rank: their total on one rank would add up in another order, and differ in the last
digit.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lathe.errors import UserError


def gather_sums(mine: dict[str, Tensor], zeros: Tensor, trainer: Trainer) -> dict[str, list[list[float]]]:
    """Return every rank's sums of training, by when they are reset; a collective."""
    kinds = ("window", "epoch") if trainer.world_size > 1 else tuple(mine)
    gathered = {}
    for kind in kinds:
        own = mine.get(kind, zeros)
        rows = [own]
        if trainer.world_size > 1:
            rows = [torch.empty_like(own) for _ in range(trainer.world_size)]
            torch.distributed.all_gather(rows, own)
        gathered[kind] = [row.tolist() for row in rows]
    return gathered


def own_sums(saved: list[list[float]], trainer: Trainer, zeros: Tensor) -> Tensor:
    """Return this rank's part of gathered sums; with another number of ranks, rank 0 resumes with the total."""
    rows = torch.tensor(saved, dtype=zeros.dtype, device=zeros.device)
    if len(rows) != trainer.world_size:
        rows = torch.cat((rows.sum(0, keepdim=True), torch.zeros_like(rows[:1]).expand(trainer.world_size - 1, -1)))
    return rows[trainer.global_rank].clone()


def gather_logs(trainer: Trainer, task: LightningModule) -> list[dict[str, Any]]:
    """Return what `self.log` was given and has not reported yet, of each rank, after writing what is due; a
    collective.
    """
    connector: Any = trainer._logger_connector
    if trainer.state.fn != "fit" or not hasattr(connector, "flush"):
        return []
    connector.flush()
    return gather_objects(connector.state(task), trainer)


def restore_logs(saved: list[dict[str, Any]], trainer: Trainer, task: LightningModule) -> None:
    """Restore this rank's part of `gather_logs`. States of torchmetrics are lost with another number of ranks, with a
    warning.
    """
    connector: Any = trainer._logger_connector
    if not hasattr(connector, "restore"):  # Lightning's own Trainer
        return
    if len(saved) == trainer.world_size:
        connector.restore(task, saved[trainer.global_rank])
    elif any(state["count"] for part in saved for state in part["metrics"].values()):
        rank_zero_warn(
            f"Resumed on {trainer.world_size} processes instead of {len(saved)}: this epoch's training torchmetrics "
            "cover the rest of it only."
        )


def gather_objects(mine: Any, trainer: Trainer) -> list[Any]:
    """Return every rank's object; a collective."""
    each = [mine] * trainer.world_size
    if trainer.world_size > 1:
        torch.distributed.all_gather_object(each, mine)
    return each


def synchronise_module(trainer: Trainer, module: LightningModule) -> None:
    """Make ranks of a user's LightningModule agree: schedulers that wait for a metric step by rank 0's, since without
    `sync_dist` each rank has its own; and `all_gather` refuses tensors of unequal shapes in evaluation, where ranks'
    last batches may differ by one sample, instead of aborting in torch.

    Raises:
        UserError: when ranks gather tensors of unequal shapes.
    """
    if trainer.world_size == 1 or "all_gather" in vars(module):
        return
    gather, step = module.all_gather, module.lr_scheduler_step

    def checked_gather(data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        if group is None and not module.training:
            own = [list(leaf.shape) for leaf in tree_leaves(data) if isinstance(leaf, Tensor)]
            shapes = gather_objects(own, trainer)
            if any(other != shapes[0] for other in shapes):
                shown = "; ".join(f"rank {rank}: {shape}" for rank, shape in enumerate(shapes[:4]))
                raise UserError(
                    f"{type(module).__name__}.all_gather: tensors differ in shape between ranks ({shown}), as each "
                    "sample is evaluated once. Reduce first, or use torchmetrics or self.log(..., sync_dist=True)."
                )
        return gather(data, group, sync_grads)

    def synchronised_step(scheduler: Any, metric: Any) -> None:
        step(scheduler, None if metric is None else trainer.strategy.broadcast(float(metric)))

    module.all_gather = checked_gather  # type: ignore[method-assign]
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        module.lr_scheduler_step = synchronised_step  # type: ignore[method-assign]


def metric_state(metric: Metric) -> dict[str, Any]:
    """Return a torchmetric's state: plain values and tensors on the CPU."""
    values = {name: getattr(metric, name) for name in metric._defaults}
    return {
        "count": metric._update_count,
        "values": {
            name: [part.detach().cpu().clone() for part in value]
            if isinstance(value, list)
            else value.detach().cpu().clone()
            for name, value in values.items()
        },
    }


def load_metric_state(metric: Metric, state: dict[str, Any]) -> None:
    """Load what `metric_state` returned."""
    metric._update_count, metric._computed = state["count"], None
    for name, value in state["values"].items():
        moved = [part.to(metric.device) for part in value] if isinstance(value, list) else value.to(metric.device)
        setattr(metric, name, moved)
