"""Callbacks that a run adds by itself: exact resume, wall time, frozen norms, Optuna reports, recompilations."""

import math
import random
from time import monotonic
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lathe.callbacks.module_access import is_users
from lathe.data.order import EpochLoader
from lathe.measure.processes import everyones


class ExactResume(Callback):
    """Resume a run exactly at its checkpoint.

    The generators of every rank are saved and restored, since dropout uses them. Lightning 2.6 drops the saved position
    of a train loader that a scheduler created early by `trainer.estimated_stepping_batches`; it is restored here.

    Ranks are seeded by (seed, replica): with equal seeds they would draw the same dropout masks for different samples,
    and ranks that share the samples of a replica, such as tensor ranks, must agree. If the number of ranks has changed
    since the checkpoint, they are seeded by (seed, replica, step) instead.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._states: list[dict[str, Any]] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop
        if (
            loop._combined_loader_states_to_load
            and loop._combined_loader is not None  # its length may be unknown
            and loop._data_fetcher is not None
        ):
            loop._combined_loader._load_state_dicts(loop._combined_loader_states_to_load)
            loop._combined_loader_states_to_load = []
            iter(loop._data_fetcher)  # replaces the iterator at the old position
        current: Any = loop.epoch_progress.current
        if current.ready and current.ready == current.started == current.processed and loop._combined_loader:
            # max_steps cut the epoch short: the loader must start the next one
            for loader in loop._combined_loader.flattened:
                if isinstance(loader, EpochLoader):
                    loader.load_state_dict({**loader.state_dict(), "batch": len(loader)})
        states, self._states = self._states, None
        # first also where there are states: those of a CPU's run have none of a GPU
        sharing = trainer.distributed_sampler_kwargs
        replica = sharing["rank"] if sharing else trainer.global_rank
        sequence = np.random.SeedSequence((self.seed, replica, trainer.global_step))
        derived = int(sequence.generate_state(1)[0])
        random.seed(derived)
        np.random.seed(derived)
        torch.manual_seed(derived)
        if states is not None and len(states) == trainer.world_size:
            _set_state(states[trainer.global_rank])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["random_state"] = everyones(_get_state())

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._states = checkpoint.get("random_state")  # Lightning's own checkpoints have none
        saved = checkpoint.get("callbacks") or {}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # a connector sets it
            if is_users(callback, "lathe") and callback.state_key not in saved and callback.state_dict():
                rank_zero_warn(
                    f"callbacks: the checkpoint has no state of {type(callback).__name__}. It starts from scratch."
                )


def _get_state() -> dict[str, Any]:
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        # one tensor: torch.save takes longer for a tuple of numbers than for the weights of a small net
        "python": (version, torch.tensor(numbers), gauss),
        "numpy": [name, torch.tensor(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    elif torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def _set_state(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    elif "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"].cpu())


class WallTime(Callback):
    """Count `seconds` since construction, plus those of earlier processes up to the restored checkpoint."""

    def __init__(self) -> None:
        self._start, self._earlier = monotonic(), 0.0

    @property
    def seconds(self) -> float:
        return self._earlier + monotonic() - self._start

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._earlier = state_dict["seconds"]


class FrozenStatistics(Callback):
    """Keep fully frozen normalization layers in eval mode, so that their statistics do not change."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for part in pl_module.modules():
            own = list(part.parameters(recurse=False))
            running = any(value is not None and "running" in name for name, value in part.named_buffers(recurse=False))
            if own and running and not any(parameter.requires_grad for parameter in own):
                part.eval()

    on_train_epoch_start = on_train_start


class TrialReport(Callback):
    """Report `monitor` to an Optuna `trial` (rank 0's) after each validation, and stop if it is pruned.

    The step of a report is the number of validations; `pruned` is the optimizer step of the stop. The last validation
    does not prune.
    """

    def __init__(self, trial: Any, monitor: str) -> None:
        self.trial, self.monitor = trial, monitor
        self.pruned: int | None = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        value, stop = trainer.callback_metrics.get(self.monitor), False
        if self.trial is not None and value is not None:
            step = validations(trainer)
            if step not in self.trial.storage.get_trial(self.trial._trial_id).intermediate_values:  # unless repeated
                self.trial.report(float(value), step)
            stop = not at_end(trainer) and bool(self.trial.should_prune())
        if trainer.strategy.broadcast(stop):
            self.pruned, trainer.should_stop = trainer.global_step, True


def at_end(trainer: Trainer) -> bool:
    """Return whether training ends with this validation anyway."""
    steps, epochs = trainer.max_steps, trainer.max_epochs
    last_epoch = epochs is not None and 0 <= epochs <= trainer.current_epoch + 1
    return 0 <= steps <= trainer.global_step or (last_epoch and trainer.is_last_batch)


def validations(trainer: Trainer) -> int:
    """Count the validations, including this one; the same after a resume."""
    interval, epochs, batches = trainer.val_check_batch, trainer.check_val_every_n_epoch, trainer.num_training_batches
    loop = trainer.fit_loop
    if isinstance(interval, int) and (epochs is None or batches == math.inf):  # counted over all batches
        return (loop.total_batch_idx + 1) // interval
    if isinstance(interval, int) and epochs is not None and interval < batches:  # counted from the start of each epoch
        return trainer.current_epoch // epochs * int(batches // interval) + (loop.epoch_loop.batch_idx + 1) // interval
    return (trainer.current_epoch + 1) // (epochs or 1)


class Graphs(Callback):
    """Count the graphs of torch.compile in the newest fit of this process.

    `made` counts all, `anew` those after the first optimizer step: recompilations, as all batches have one size.
    """

    skippable_steps = None  # every step is needed
    made = anew = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        type(self).made = type(self).anew = 0
        self._before, self._first = _graphs(), -1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        type(self).made = _graphs() - self._before
        if self._first < 0 and trainer.global_step > 0:
            self._first = self.made
        if self._first >= 0:
            type(self).anew = self.made - self._first


def _graphs() -> int:
    from torch._dynamo.utils import counters  # a second of imports, which few runs need

    return int(counters["stats"]["unique_graphs"])
