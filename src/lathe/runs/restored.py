"""States that the parts of a user's own have kept in a checkpoint, for an evaluation of it."""

from copy import deepcopy
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


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
