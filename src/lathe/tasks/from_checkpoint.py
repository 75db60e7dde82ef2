"""`load_from_checkpoint` as Lightning's users call it."""

from pathlib import Path
from typing import Any, Self

from lightning.pytorch import LightningModule
from torch import nn

import lathe
from lathe.errors import require


class FromCheckpoint(LightningModule):
    """A LightningModule around a `net` whose checkpoints hold the net's own plain names."""

    net: nn.Module

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]  # Lightning's, without what Lathe's checkpoints do not have
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """The task with the weights and the structure of a checkpoint; no code of the file is run.

        Without `net`, all of it is rebuilt from the config.yaml of the run directory that the checkpoint lies in, under
        the rules of lathe.trust, and is in eval mode without an optimizer. With `net`, the class is made of `net` and
        the other arguments, as Lightning does it; `strict` False takes the weights that fit.

        Raises:
            UserError: there is no run around the checkpoint, it is damaged, or it does not fit.
        """
        require(weights_only is not False, "weights_only=False: checkpoints are plain tensors; leave weights_only out.")
        path = Path(checkpoint_path)
        if "net" in kwargs:
            task = cls(**kwargs)
            lathe.restore(task.net, path, strict=strict is not False, key="checkpoint_path")
        else:
            given = ", ".join([*kwargs, *(["strict"] if strict is False else [])])
            require(not given, f"{given}: expected with net=, the net to fill; without it config.yaml says all.")
            require(path.exists(), f"checkpoint_path={path}: there is no such file.")
            home = path.resolve().parent.parent
            require(
                (home / "config.yaml").is_file(),
                f"checkpoint_path={path} lies in no run directory, whose config.yaml would say what its net is: give "
                "net=, the net to fill.",
            )
            task = lathe.load(home, path.resolve().stem, key="checkpoint_path").task
            require(
                isinstance(task, cls),
                f"checkpoint_path={path} is of a {type(task).__name__}: expected a {cls.__name__}; load it with its "
                "own class.",
            )
        return task if map_location is None else task.to(map_location)
