"""Restore the random generators, and the position in the data if Lightning does not."""

import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lathe.callbacks.ownership import is_users
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
            and loop._combined_loader is not None
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
        if states is not None and len(states) == trainer.world_size:
            _set_state(states[trainer.global_rank])
        else:
            sharing = trainer.distributed_sampler_kwargs
            replica = sharing["rank"] if sharing else trainer.global_rank
            sequence = np.random.SeedSequence((self.seed, replica, trainer.global_step))
            word = int(sequence.generate_state(1)[0])
            random.seed(word)
            np.random.seed(word)
            torch.manual_seed(word)

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
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        # one tensor: torch.save takes longer for a tuple of numbers than for the weights of a small net
        "python": (version, torch.tensor(words), gauss),
        "numpy": [
            name,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_state(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
