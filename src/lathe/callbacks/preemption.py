"""Write a checkpoint when a signal asks the run to stop."""

import math
import signal
import threading
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lathe.callbacks.checkpoint import Checkpoint, validation_follows
from lathe.config.types import Count
from lathe.config.validation import validated
from lathe.data.steps import reached, steps_before

# SLURM's --signal is USR1 by convention, a terminal that closes sends HUP; Windows has neither
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))


class Preemption(Callback):
    """Finish the optimizer step on SIGTERM, SIGHUP or SIGUSR1, write last.ckpt and stop.

    A due validation runs first. A signal that the process ignores, as SIGHUP under nohup, stays ignored. Lightning's
    handler starts a collective inside the signal handler, which can interleave with another rank's gradient reduction.
    This one only stores the signal; every `every_n_steps` optimizer steps the ranks agree whether one was signalled,
    and stop at the same step. A stop at an epoch's last step waits for the next step: no checkpoint contains the end of
    an epoch (its row, a due stop), and a resumed run would skip it. After the last epoch, the run stops before the
    test.
    """

    stops_all = True  # the ranks agree on a stop here, so Lightning need not ask them before every batch

    @validated
    def __init__(self, every_n_steps: Count = 10) -> None:
        self.every_n_steps = every_n_steps
        self.received: str | None = None
        self._before: dict[int, Any] = {}
        self._agreed = self._alone = self._waits = False

    def skippable_steps(self, trainer: Trainer) -> float:
        """Return inf for one process without a signal; several ranks agree at every n-th step."""
        if self.received is not None or self._agreed:
            return 0
        return math.inf if self._alone else steps_before(trainer, self.every_n_steps)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._alone = trainer.world_size == 1
        # Not sooner: Lightning registers its handlers after on_fit_start, and would call them before this one.
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        if threading.current_thread() is not threading.main_thread():  # handlers can be set only in the main thread
            heard = []
        self._before = {number: signal.signal(number, self._note) for number in heard}

    def _note(self, number: int, frame: Any) -> None:
        self.received = signal.Signals(number).name

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._alone and self.received is None and not self._agreed:
            return
        if trainer.fit_loop._should_accumulate():
            return  # no checkpoint contains accumulated gradients
        if not self._agreed:
            if trainer.world_size > 1 and not reached(trainer, self.every_n_steps):
                return
            self._agreed = self._any_rank(trainer)
        if self._agreed and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            # If the flag is set during validation, Lightning stops between two of its batches, and a resumed run lacks
            # that validation. A validation that was waited for and did not come has no batches.
            self._waits = validation_follows(trainer) and not self._waits
            self._stop_after_this_step(trainer, not self._waits)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._waits:
            self._waits = False
            self._stop_after_this_step(trainer, True)

    def _stop_after_this_step(self, trainer: Trainer, stop: bool) -> None:
        # Lightning raises SIGTERMException at the end of the step
        trainer._signal_connector.received_sigterm = stop

    def _any_rank(self, trainer: Trainer) -> bool:
        stop = self.received is not None
        if trainer.world_size > 1:
            # over all ranks: a strategy's own reduce may cover only some of them
            shared = torch.tensor(float(stop), device=trainer.strategy.root_device)
            torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
            stop = bool(shared.item())
        if stop:
            self.received = self.received or "SIGTERM"
        return stop

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()
        if self._agreed or self._any_rank(trainer):
            raise SIGTERMException

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()
        if isinstance(exception, SIGTERMException):
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, Checkpoint) and callback.saved_step != trainer.global_step:
                    callback.save_last(trainer)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
