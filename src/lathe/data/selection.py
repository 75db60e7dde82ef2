"""Selection of an epoch's training samples by their latest loss."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lathe.data.random import epoch_permutation
from lathe.errors import require


class Selection:
    """Epochs of a `share` of the samples, with the `hardest` part of it by loss, the rest drawn.

    Samples trained on fewer than `passes` times come first, so that losses are meaningful before they decide. A
    sample's loss is that of its last use. The order of an epoch is fixed when it begins, and is the same after a
    resume.

    Choosing by the latest known loss: Loshchilov and Hutter 2016, "Online Batch Selection for Faster Training of Neural
    Networks", arXiv:1511.06343, which ranks all samples and draws with probabilities that fall with the rank.
    """

    def __init__(self, share: float, hardest: float, passes: int) -> None:
        self.share, self.hardest, self.passes = share, hardest, passes
        self._batch = 1
        self.losses = torch.empty(0)  # float32 [n]
        self.turns = torch.empty(0, dtype=torch.int32)  # number of uses of each sample; int32 [n]
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)
        self._restored: Mapping[str, Any] | None = None

    def count(self, n: int, batch_size: int) -> int:
        """Return how many of `n` samples an epoch takes: whole batches, or less than one."""
        share = max(1, round(n * self.share))
        return share - share % batch_size or share

    def begin(self, n: int, batch_size: int) -> None:
        """Start with a training set of `n` samples, or at a restored state; `batch_size` is global."""
        self._batch = batch_size
        self.losses, self.turns = torch.full((n,), torch.inf), torch.zeros(n, dtype=torch.int32)
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)
        self._place()

    def order(self, seed: int, epoch: int) -> Tensor:
        """Return the samples of an epoch in order, int64; past epochs are computed from the present losses."""
        if epoch == self._epoch:
            return self._order
        order = self._chosen(seed, epoch)
        if epoch > self._epoch:
            self._epoch, self._order = epoch, order
        return order

    def _chosen(self, seed: int, epoch: int) -> Tensor:
        n = len(self.losses)
        drawn, count = epoch_permutation(seed, epoch, n), self.count(n, self._batch)
        turns, losses = self.turns.cpu()[drawn].clamp(max=self.passes), self.losses.cpu()[drawn]
        due = turns < self.passes
        fewest = turns.argsort(stable=True)
        ranked = fewest[losses.where(~due, torch.inf)[fewest].argsort(descending=True, stable=True)]
        hard = ranked[: max(round(count * self.hardest), min(int(due.sum()), count))]
        left = torch.ones(n, dtype=torch.bool)
        left[hard] = False
        places = torch.cat((hard, left.nonzero().flatten()[: count - len(hard)]))
        return drawn[places.sort().values]  # the order is random, not by loss

    def note(self, samples: Tensor, losses: Tensor) -> None:
        """Record the losses [k] of these samples [k], on one device; NaN counts as hardest."""
        if self.losses.device != losses.device:
            self.losses, self.turns = self.losses.to(losses.device), self.turns.to(losses.device)
        self.losses[samples] = losses.float().nan_to_num(nan=torch.inf)
        self.turns[samples] += 1

    def merge(self, others: list[tuple[Tensor, Tensor]]) -> None:
        """Merge other processes' losses and turns: for each sample, those of its last use."""
        for losses, turns in others:
            losses, turns = losses.to(self.losses.device), turns.to(self.turns.device)
            newer = turns > self.turns
            self.losses, self.turns = losses.where(newer, self.losses), turns.where(newer, self.turns)

    def state(self) -> dict[str, Any]:
        """Return the state for a resume."""
        return {
            "losses": self.losses.cpu().clone(),
            "turns": self.turns.cpu().clone(),
            "epoch": self._epoch,
            "order": self._order,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state, at once or in `begin`."""
        self._restored = state
        if len(self.losses):
            self._place()

    def _place(self) -> None:
        state = self._restored
        if state is None:
            return
        n = len(self.losses)
        count, kept = self.count(n, self._batch), len(state["losses"])
        require(
            kept == n,
            f"callbacks.hard_samples: the checkpoint has losses of {kept} training samples, and there are {n} now: go "
            "on with the same data, or start a new run from its weights with ckpt_path.",
        )
        require(
            state["epoch"] < 0 or len(state["order"]) == count,
            f"callbacks.hard_samples.share={self.share} takes {count} samples in an epoch, and the checkpoint's took "
            f"{len(state['order'])}: go on with the same share, or start a new run from its weights with ckpt_path.",
        )
        self.losses, self.turns = state["losses"].clone(), state["turns"].clone()
        self._epoch, self._order = state["epoch"], state["order"]
