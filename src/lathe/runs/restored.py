"""States that the parts of a user's own have kept in a checkpoint, for an evaluation of it."""

from copy import deepcopy
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lathe.data.base import ExactDataModule


def other_sizes(datamodule: Any, checkpoint: dict[str, Any]) -> str | None:
    """In which splits the data have another number of samples than when `checkpoint` was written, such as "train 900 ->
    901"; None in none, or where either does not say.
    """
    kept = checkpoint.get(type(datamodule).__qualname__)
    before = kept.get("sizes") if isinstance(kept, dict) else None
    now = getattr(datamodule, "sizes", None)
    if not isinstance(before, dict) or not isinstance(now, dict):
        return None
    return ", ".join(f"{n} {before[n]} -> {now[n]}" for n in now if n in before and before[n] != now[n]) or None


def other_seed(datamodule: Any, checkpoint: dict[str, Any]) -> int | None:
    """The seed of the data that `checkpoint` was written with, if that is another: it is another run's."""
    if not isinstance(datamodule, ExactDataModule):  # a user's own may keep something else under that name
        return None
    kept = checkpoint.get(type(datamodule).__qualname__)
    seed = kept.get("seed") if isinstance(kept, dict) else None
    return None if seed is None or seed == datamodule.seed else seed


class Restored(Callback):
    """Gives the data module and the user's own callbacks what they had kept in `checkpoint`, once they are set up, as
    `Trainer.test(ckpt_path=...)` does; the last of a Trainer's callbacks. Those of Lathe and Lightning act in training
    alone, and count on.
    """

    def __init__(self, checkpoint: dict[str, Any]) -> None:
        self._checkpoint = checkpoint

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        kept, datamodule = self._checkpoint, trainer.datamodule  # type: ignore[attr-defined]  # a connector sets it
        name = type(datamodule).__qualname__
        changed = other_sizes(datamodule, kept)
        if changed is not None and stage != "fit":
            rank_zero_warn(
                f"The data have changed since this checkpoint was trained: samples of {changed}. Where splits are cut "
                "out of one set, some of those that were trained on may be in another split now."
            )
        seed = other_seed(datamodule, kept)
        if seed is not None and stage != "fit":
            rank_zero_warn(f"This checkpoint is another run's: it was written with data.seed={seed}.")
        if datamodule is not None and name in kept:
            datamodule.load_state_dict(kept[name])
        everyone: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # likewise
        own = [one for one in everyone if not type(one).__module__.startswith(("lathe.", "lightning."))]
        for callback in own:
            callback.on_load_checkpoint(trainer, pl_module, kept)
        for callback in own:
            state = kept.get("callbacks", {}).get(callback.state_key)
            if state:
                callback.load_state_dict(deepcopy(state))
