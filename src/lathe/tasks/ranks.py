"""What a checkpoint keeps of metrics under way: each rank's own, for their total on one rank would add up in another
order, and differ in the last digit.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lathe.errors import UserError


def sums(mine: Tensor, trainer: Trainer) -> list[list[float]]:
    """Every rank's sums [sums]; a collective."""
    rows = [mine] * trainer.world_size
    if trainer.world_size > 1:
        rows = [torch.empty_like(mine) for _ in rows]
        torch.distributed.all_gather(rows, mine)
    return [row.tolist() for row in rows]


def tables(mine: dict[str, dict[str, Tensor]], nothing: Tensor, trainer: Trainer) -> dict[str, list[list[float]]]:
    """Every rank's sums of training, by what they are reset after; a collective."""
    return {
        kind: sums(table.get("train", nothing), trainer)
        for kind, table in mine.items()
        if "train" in table or trainer.world_size > 1
    }


def own_sums(saved: list[list[float]], trainer: Trainer, nothing: Tensor) -> Tensor:
    """This rank's part of what `sums` gave; on other devices than before, one rank goes on with the total."""
    rows = torch.tensor(saved, dtype=nothing.dtype, device=nothing.device)
    if len(rows) != trainer.world_size:
        rows = torch.cat((rows.sum(0, keepdim=True), torch.zeros_like(rows[:1]).expand(trainer.world_size - 1, -1)))
    return rows[trainer.global_rank].clone()


def logs(trainer: Trainer, task: LightningModule) -> list[dict[str, Any]]:
    """What `self.log` was given and has not reported yet, of each rank, after writing what is due; a collective."""
    connector: Any = trainer._logger_connector
    if trainer.state.fn != "fit" or not hasattr(connector, "flush"):
        return []
    connector.flush()
    return gathered(connector.state(task), trainer)


def gathered(mine: Any, trainer: Trainer) -> list[Any]:
    """Every rank's; a collective."""
    each = [mine] * trainer.world_size
    if trainer.world_size > 1:
        torch.distributed.all_gather_object(each, mine)
    return each


def agree(trainer: Trainer, module: LightningModule) -> None:
    """Has a user's own module step the schedulers that wait for a metric by that of the first rank, and refuse to
    gather what ranks have in other shapes.

    A metric that was logged without `sync_dist` is each rank's own: their rates, and then their weights, would part.
    And an evaluation sees each sample once, so ranks' last batches may differ by one, of which a collective of torch
    makes an abort.

    Raises:
        UserError: when ranks gather tensors of other shapes.
    """
    if trainer.world_size == 1 or "all_gather" in vars(module):
        return
    gather, step = module.all_gather, module.lr_scheduler_step

    def gathering(data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        if group is None and not module.training:
            shapes = gathered([list(leaf.shape) for leaf in tree_leaves(data) if isinstance(leaf, Tensor)], trainer)
            if any(other != shapes[0] for other in shapes):
                told = "; ".join(f"rank {rank}: {shape}" for rank, shape in enumerate(shapes[:4]))
                raise UserError(
                    f"{type(module).__name__}.all_gather has tensors of other shapes on other ranks ({told}): each "
                    "sample is evaluated once, so the last batches of ranks may differ by one; reduce before you "
                    "gather, or use torchmetrics or self.log(..., sync_dist=True)."
                )
        return gather(data, group, sync_grads)

    def stepping(scheduler: Any, metric: Any) -> None:
        step(scheduler, None if metric is None else trainer.strategy.broadcast(float(metric)))

    module.all_gather = gathering  # type: ignore[method-assign]
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        module.lr_scheduler_step = stepping  # type: ignore[method-assign]


def restore_logs(saved: list[dict[str, Any]], trainer: Trainer, task: LightningModule) -> None:
    """Puts back this rank's part of what `logs` gave. That of another number of ranks fits nobody; the loss of the
    states of torchmetrics is told."""
    connector: Any = trainer._logger_connector
    if not hasattr(connector, "restore"):  # a Trainer of plain Lightning
        return
    if len(saved) == trainer.world_size:
        connector.restore(task, saved[trainer.global_rank])
    elif any(state["count"] for part in saved for state in part["metrics"].values()):
        rank_zero_warn(
            f"The torchmetrics of the epoch that was interrupted on {len(saved)} processes do not fit "
            f"{trainer.world_size}: their training metrics of this epoch are over the rest of it."
        )


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
