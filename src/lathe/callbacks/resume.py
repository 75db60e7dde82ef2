"""What Lightning leaves out when it continues a run: the random number generators, and often the position in the
data.
"""

import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lathe.data.order import EpochLoader
from lathe.measure.processes import everyones


class ExactResume(Callback):
    """Makes a continued run go on exactly where its checkpoint was written.

    Every rank's generators (dropout draws from them) are saved and put back. The train loader's position is put back
    even if the loader was made before the loops were restored: a scheduler that asks for
    `trainer.estimated_stepping_batches` makes it so early that Lightning 2.6 drops the saved position without a word.

    Ranks start from (seed, replica): the same seed would give them the same dropout masks on different samples, and
    ranks that share a replica's samples, as tensor ranks do, have to agree. After a change of the number of ranks the
    saved states fit nobody; the generators then start from (seed, replica, step).
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
            iter(loop._data_fetcher)  # its iterator was made before the position was known
        current: Any = loop.epoch_progress.current
        if current.ready and current.ready == current.started == current.processed and loop._combined_loader:
            # its epoch was ended early, as by max_steps: Lightning counts the next one, whose data are its own
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
        kept = checkpoint.get("callbacks") or {}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # a connector sets it
            own = not type(callback).__module__.startswith("lathe.")
            if own and callback.state_key not in kept and callback.state_dict():
                rank_zero_warn(
                    f"callbacks: the checkpoint has no state of {type(callback).__name__}, which starts anew."
                )


def _get_state() -> dict[str, Any]:
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        # as one tensor: torch's writer asks about each number of a tuple, for longer than a small net's weights take
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
