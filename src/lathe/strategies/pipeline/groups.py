"""Process groups on the mesh of a pipeline, and the broadcast of initial values."""

from typing import Any

import torch
import torch.distributed as dist

from lathe.config.parallel_dims import Axes
from lathe.strategies.pipeline.cut import Cut
from lathe.strategies.pipeline.gradients import local


def make_groups(device_type: str, shape: Axes, place: tuple[int, int, int]) -> dict[str, Any]:
    """Return the `mesh` and the groups of the rank at `place` (data replica, stage, tensor rank).

    The groups are `data`, `stages` and `tensor` along the axes, `model` for one replica, and `ends` for the first and
    last stage.
    """
    mesh = dist.device_mesh.init_device_mesh(
        device_type, (shape.data, shape.stages, shape.tensor), mesh_dim_names=("data", "stages", "tensor")
    )
    groups = {name: mesh[name].get_group() for name in ("data", "stages", "tensor")} | {"mesh": mesh}
    # every rank creates all of these groups in the same order, as torch requires
    ranks = mesh.mesh
    mine, _, tensor = place
    for data in range(shape.data):
        model = dist.new_group(ranks[data].flatten().tolist())
        if data == mine:
            groups["model"] = model
        for t in range(shape.tensor):
            ends = dist.new_group([int(ranks[data, 0, t]), int(ranks[data, -1, t])])
            if (data, t) == (mine, tensor):
                groups["ends"] = ends
    return groups


def agree(cut: Cut, groups: dict[str, Any], replicas: int) -> None:
    """Broadcast initial values to ranks that share a tensor. A net may use its own generators."""
    with torch.no_grad():
        if replicas > 1:
            for tensor in cut.net.state_dict().values():
                dist.broadcast(local(tensor), dist.get_global_rank(groups["data"], 0), groups["data"])
        if cut.first or cut.last:
            state = cut.net.state_dict()
            for name in cut.outside:
                dist.broadcast(local(state[name]), dist.get_global_rank(groups["ends"], 0), groups["ends"])
