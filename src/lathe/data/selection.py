"""Which training samples an epoch takes, by the loss that each had when it was last seen."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lathe.data.random import epoch_permutation
from lathe.errors import require


class Selection:
    """Epochs of a `share` of the samples, of which those with the largest losses make up `hardest`; the others are
    drawn from the rest by (seed, epoch, sample).

    A sample that has not been trained on `passes` times yet comes before all others, so that losses mean something
    before they decide. A sample's loss is that of its last turn. The order of an epoch is settled when it begins, and
    again the same in a run that goes on within it.

    Choosing by the latest known loss: Loshchilov and Hutter 2016, "Online Batch Selection for Faster Training of Neural
    Networks", arXiv:1511.06343, which ranks all samples and draws with probabilities that fall with the rank.

    Raises UserError where a checkpoint's state is of other data, of another share, or none.
    """

    def __init__(self, share: float, hardest: float, passes: int) -> None:
        self.share, self.hardest, self.passes = share, hardest, passes
        self._batch = 1
        self.losses = torch.empty(0)  # float32 [n]
        self.turns = torch.empty(0, dtype=torch.int32)  # of each sample so far; int32 [n]
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)
        self._restored: Mapping[str, Any] | None = None

    def count(self, n: int, batch_size: int) -> int:
        """How many of `n` samples an epoch takes, in whole batches; fewer than a batch where that is all."""
        share = max(1, round(n * self.share))
        return share - share % batch_size or share

    def begin(self, n: int, batch_size: int) -> None:
        """Of a training set of `n` samples, at its first epoch, or where a checkpoint left it; batches are global."""
        self._batch = batch_size
        self.losses, self.turns = torch.full((n,), torch.inf), torch.zeros(n, dtype=torch.int32)
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)
        self._place()

    def order(self, seed: int, epoch: int) -> Tensor:
        """The samples of an epoch in their order, int64.

        That of the newest epoch is kept; one that is past is not known any more, and made as if it began now.
        """
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
        return drawn[places.sort().values]  # the order is drawn too, not that of the losses

    def note(self, samples: Tensor, losses: Tensor) -> None:
        """The losses [k] with which these samples [k] were just trained on, all on one device; of a loss that is no
        number the sample counts as one of the hardest.
        """
        if self.losses.device != losses.device:
            self.losses, self.turns = self.losses.to(losses.device), self.turns.to(losses.device)
        self.losses[samples] = losses.float().nan_to_num(nan=torch.inf)
        self.turns[samples] += 1

    def merge(self, others: list[tuple[Tensor, Tensor]]) -> None:
        """Takes over what other processes know: of each sample the losses and turns of the one that saw it last."""
        for losses, turns in others:
            losses, turns = losses.to(self.losses.device), turns.to(self.turns.device)
            newer = turns > self.turns
            self.losses, self.turns = losses.where(newer, self.losses), turns.where(newer, self.turns)

    def state(self) -> dict[str, Any]:
        """What a run that goes on needs."""
        return {
            "losses": self.losses.cpu().clone(),
            "turns": self.turns.cpu().clone(),
            "epoch": self._epoch,
            "order": self._order,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from there, now or where `begin` will be called."""
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
