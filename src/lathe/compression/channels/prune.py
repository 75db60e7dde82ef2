"""Channel removal in one call, and its options."""

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
    """Options of channel removal; the keys of `compression.prune_channels`.

    `budget`: `macs`, `parameters` or `latency` (on the example's device); `share`: of the dense net's, in (0, 1);
    `exclude`: patterns of layers; see `scores` and `choose` for the others.
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
        """Return the units to remove, by group; `net` has the dense net's shapes, `tensors` its full weights."""
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
    """Remove channels, heads and hidden units from `net`, in place, until it meets a budget.

    Returns the remaining shares, {"macs": share, "parameters": share}. Call `reestimate_batchnorm` and fine-tune
    afterwards. `example` is an input `[batch, ...]`, `options` are those of `Options`; `importance="taylor"` needs
    `sensitivity`, means of `loss_change` over batches.

    Raises:
        UserError: an option is out of range, the net can't be traced, or the budget can't be met.
    """
    chosen = Options(**options)  # type: ignore[arg-type]
    groups = find_groups(net, example, chosen.exclude)
    before = sizes(net, example)
    with torch.no_grad():
        units = chosen.pick(net, groups, example, dict(net.named_parameters()), sensitivity, seed)
    remove(net, groups, units)
    return shares(before, sizes(net, example))


def sizes(net: nn.Module, example: Tensor) -> dict[str, int]:
    """Count the MACs of one sample, and the parameters, without computing anything."""
    skeleton, shape = channel_budget.skeleton(net, example)
    return {"macs": channel_budget.macs(skeleton, shape), "parameters": channel_budget.parameters(skeleton)}


def shares(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, float]:
    """Return the remaining share of each size."""
    return {name: after[name] / size for name, size in before.items()}
