"""Schedulers that wait for a metric, in a run that goes on.

Lightning 2.6 steps a ReduceLROnPlateau behind the place at which a checkpoint of the same moment is written, keeps no
metric for it, and leaves it out altogether in the first epoch after a start from a checkpoint: such a run lacks one of
its steps. Here a checkpoint says which steps it was written before and what they would have seen, and the run that goes
on takes them first.
"""

from typing import Any

from lightning.pytorch.trainer import call


class Plateaus:
    """What the epoch loop `loop` knows of the schedulers with `reduce_on_plateau` that Lightning steps."""

    def __init__(self, loop: Any) -> None:
        self.loop = loop
        self._kept = False  # whether the checkpoint that the run goes on from has all this
        self._owed: list[int] = []  # indices of those that a checkpoint was written before a step of
        self._epoch = -1  # in which it was written
        self._values: dict[str, float] = {}  # what they would have seen
        self._stepped: dict[int, list[int]] = {}  # where each was stepped last

    def state(self) -> dict[str, Any] | None:
        """For a checkpoint; None where no scheduler waits."""
        found = self._all()
        if not found:
            return None
        values = {config.monitor: self.value(config.monitor) for _, config in found}
        return {
            "owed": [index for index, config in found if index in self._owed or self._is_due(index, config)],
            "epoch": self.loop.trainer.current_epoch,
            "values": {name: float(value) for name, value in values.items() if value is not None},
            "stepped": dict(self._stepped),
        }

    def restore(self, state: dict[str, Any] | None) -> None:
        """What `state` gave; None of a checkpoint without it."""
        self._kept = state is not None
        state = state or {"owed": [], "epoch": -1, "values": {}, "stepped": {}}
        self._owed, self._epoch = list(state["owed"]), state["epoch"]
        self._values, self._stepped = dict(state["values"]), dict(state["stepped"])

    def value(self, monitor: str) -> Any:
        """A metric as it was reported last, before the checkpoint if not since; None: it never was."""
        found = self.loop.trainer.callback_metrics.get(monitor)
        return self._values.get(monitor) if found is None else found

    def known(self) -> bool:
        """Whether those that wait for the end of an epoch can be stepped at the first one of a run that goes on: what
        they have seen is there, and nothing of what a checkpoint of an older version did not keep is asked for.
        """
        if self._kept:
            return True
        monitors = [config.monitor for _, config in self._all() if config.interval == "epoch"]
        return bool(monitors) and all(self.value(monitor) is not None for monitor in monitors)

    def stepped(self, interval: str) -> None:
        """Lightning has stepped those whose turn it was."""
        for index, config in self._all():
            if config.interval == interval and (self._count(interval) + 1) % config.frequency == 0:
                self._stepped[index] = self._place(interval)
                self._owed = [owed for owed in self._owed if owed != index]

    def begin_epoch(self) -> None:
        """Takes the steps of the epoch before, which Lightning does not end again."""
        if self.loop.trainer.current_epoch > self._epoch:
            self.settle()

    def settle(self) -> None:
        """Takes the steps that are owed, before another batch."""
        owed, self._owed = self._owed, []
        for index in owed:
            config = self.loop.trainer.lr_scheduler_configs[index]
            value = self.value(config.monitor)
            if value is None:
                continue  # it was not there either when the checkpoint was written
            self.loop.scheduler_progress.increment_ready()
            call._call_lightning_module_hook(self.loop.trainer, "lr_scheduler_step", config.scheduler, value)
            self.loop.scheduler_progress.increment_completed()

    def _all(self) -> list[tuple[int, Any]]:
        trainer = self.loop.trainer
        if not trainer.lightning_module.automatic_optimization:
            return []
        return [
            (index, config) for index, config in enumerate(trainer.lr_scheduler_configs) if config.reduce_on_plateau
        ]

    def _count(self, interval: str) -> int:
        count: int = self.loop.batch_idx if interval == "step" else self.loop.trainer.current_epoch
        return count

    def _place(self, interval: str) -> list[int]:
        epoch = self.loop.trainer.current_epoch
        return [epoch, self.loop.batch_idx] if interval == "step" else [epoch]

    def _is_due(self, index: int, config: Any) -> bool:
        """Whether its turn has come and Lightning has not stepped it yet."""
        loop, done = self.loop, self.loop.batch_progress.current
        if done.processed != done.ready or done.ready == 0 or (self._count(config.interval) + 1) % config.frequency:
            return False
        reached = loop._num_ready_batches_reached() if config.interval == "epoch" else not loop._should_accumulate()
        return bool(reached) and self._stepped.get(index) != self._place(config.interval)
