"""Channel removal in one call, and the options that every form of it takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lathe.compression.channels import budget as channel_budget
from lathe.compression.channels.budget import choose, cost_function
from lathe.compression.channels.groups import find_groups
from lathe.compression.channels.scores import scores
from lathe.compression.channels.slices import Group, remove
from lathe.config.types import ChannelBudget, ChannelImportance, Count, Name, OpenShare
from lathe.config.validation import validated


@validated
@dataclass(frozen=True)
class Options:
    """What may remain, and what decides about it; the keys of `compression.prune_channels`.

    `budget`: `macs`, `parameters` or `latency` (measured on the device that the example is on); `share`: how much of
    the dense net's may remain, in (0, 1); `importance`: see `scores`; `scope`, `round_to`, `min_channels`: see
    `choose`; `exclude`: patterns of layers that are left alone.
    """

    budget: ChannelBudget = "macs"
    share: OpenShare = 0.5
    importance: ChannelImportance = "group_norm"
    scope: Literal["global", "local"] = "global"
    round_to: Count | None = None
    min_channels: Count = 4
    exclude: tuple[Name, ...] = ()

    def pick(
        self,
        net: nn.Module,
        groups: Sequence[Group],
        example: Tensor,
        tensors: Mapping[str, Tensor],
        sensitivity: Mapping[str, Tensor] | None = None,
        seed: int = 0,
    ) -> dict[str, list[int]]:
        """The units to remove, by group. `net` gives the dense net's shapes (and times, for latency), `tensors` its
        whole weights.
        """
        base, cost = cost_function(self.budget, net, example)
        found = scores(groups, tensors, self.importance, sensitivity=sensitivity, seed=seed)
        return choose(
            groups, found, base, cost, self.share, scope=self.scope, round_to=self.round_to, min_units=self.min_channels
        )


def prune_channels(
    net: nn.Module,
    example: Tensor,
    *,
    sensitivity: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    **options: object,
) -> dict[str, float]:
    """Removes channels, heads and hidden units from `net`, in place, until it keeps to a budget; returns what remains
    of the dense net, {"macs": share, "parameters": share}. Fine-tune afterwards, and re-estimate BatchNorm's statistics
    before (`reestimate_batchnorm`).

    Args:
        example: an input `[batch, ...]`.
        sensitivity: for `importance="taylor"`, means of `loss_change` over batches.
        seed: for `importance="random"`.
        options: those of `Options`.

    Raises:
        UserError: for an option out of range, a net that can't be followed, or a budget that can't be met.
    """
    chosen = Options(**options)  # type: ignore[arg-type]
    groups = find_groups(net, example, chosen.exclude)
    before = sizes(net, example)
    with torch.no_grad():
        units = chosen.pick(net, groups, example, dict(net.named_parameters()), sensitivity, seed)
    remove(net, groups, units)
    return shares(before, sizes(net, example))


def sizes(net: nn.Module, example: Tensor) -> dict[str, int]:
    """MACs of one sample, and parameters. Nothing is computed."""
    skeleton, shape = channel_budget.skeleton(net, example)
    return {"macs": channel_budget.macs(skeleton, shape), "parameters": channel_budget.parameters(skeleton)}


def shares(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, float]:
    """What remains of each size."""
    return {name: after[name] / size for name, size in before.items()}
