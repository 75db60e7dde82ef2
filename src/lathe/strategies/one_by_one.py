"""Disables foreach for optimizers that mix sharded and plain parameters, which it does not support."""

from typing import Any

from torch.optim import Optimizer

from lathe.errors import UserError


def step_one_by_one(optimizer: Optimizer, strategy: str) -> bool:
    """Disable `foreach` if the optimizer's parameters are on different meshes; return whether they are."""
    meshes = {
        getattr(parameter, "device_mesh", None) for group in optimizer.param_groups for parameter in group["params"]
    }
    if len(meshes) < 2:
        return False
    for group in optimizer.param_groups:
        for key in ("fused", "foreach"):
            if group.get(key):
                raise UserError(
                    f"optimizer.{key}=true updates all tensors in one call, but under strategy={strategy} some are cut "
                    f"and some are whole: set optimizer.{key}=null."
                )
        if "foreach" in group:
            group["foreach"] = False
    return True


def as_asked_for(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with `foreach` as before `step_one_by_one`, for other strategies."""
    groups = [
        {key: None if key == "foreach" else value for key, value in group.items()} for group in state["param_groups"]
    ]
    return {**state, "param_groups": groups}
