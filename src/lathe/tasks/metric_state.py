"""States of logged values and torchmetrics in checkpoints, for each rank."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torchmetrics import Metric

from lathe.measure.processes import everyones


def gather_logs(trainer: Trainer, module: LightningModule) -> list[dict[str, Any]]:
    """Write what `self.log` has due, and return what it has not reported yet, of each rank; a collective."""
    connector: Any = trainer._logger_connector
    if trainer.state.fn != "fit" or not hasattr(connector, "flush"):  # Lightning's own Trainer
        return []
    connector.flush()
    return everyones(connector.state(module))


def restore_logs(saved: list[dict[str, Any]], trainer: Trainer, module: LightningModule) -> None:
    """Restore this rank's part of `gather_logs`; warn where another number of ranks loses states of torchmetrics."""
    connector: Any = trainer._logger_connector
    if not hasattr(connector, "restore"):
        return
    if len(saved) == trainer.world_size:
        connector.restore(module, saved[trainer.global_rank])
    elif any(state["count"] for part in saved for state in part["metrics"].values()):
        rank_zero_warn(
            f"Resumed on {trainer.world_size} processes instead of {len(saved)}: this epoch's training torchmetrics "
            "cover the rest of it only."
        )


def metric_state(metric: Metric) -> dict[str, Any]:
    """Return a torchmetric's state: plain values and tensors on the CPU."""
    values: dict[str, Any] = {}
    for name in metric._defaults:
        value = getattr(metric, name)
        parts = [part.detach().cpu().clone() for part in (value if isinstance(value, list) else [value])]
        values[name] = parts if isinstance(value, list) else parts[0]
    return {"count": metric._update_count, "values": values}


def load_metric_state(metric: Metric, state: dict[str, Any]) -> None:
    """Load what `metric_state` returned."""
    metric._update_count, metric._computed = state["count"], None
    for name, value in state["values"].items():
        moved = [part.to(metric.device) for part in value] if isinstance(value, list) else value.to(metric.device)
        setattr(metric, name, moved)
