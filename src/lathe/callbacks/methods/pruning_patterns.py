"""Pruning in patterns that hardware or a smaller file can use: whole rows, or N of every M consecutive inputs."""

from typing import Any

from lathe.callbacks.methods.pruning import Prune
from lathe.compression.masks.masks import check_options
from lathe.config.schema.held import held


@held("lathe.callbacks.PruneStructured")
class PruneStructured(Prune):
    """Prune whole rows: the output channels of convolutions, the output features of linear layers."""

    name = "prune_structured"

    def __init__(
        self,
        sparsity: float = 0.5,
        scope: str = "layer",
        criterion: str = "magnitude",
        norm: float = 2.0,
        schedule: str = "cubic",
        initial_sparsity: float = 0.0,
        start: float = 0.1,
        end: float = 0.6,
        every_n_steps: int | None = None,
        **options: Any,
    ) -> None:
        shared: dict[str, Any] = {
            "schedule": schedule,
            "initial_sparsity": initial_sparsity,
            "start": start,
            "end": end,
        }
        super().__init__(
            sparsity, "structured", scope, criterion, norm, every_n_steps=every_n_steps, **shared, **options
        )


@held("lathe.callbacks.PruneNM")
class PruneNM(Prune):
    """Prune to N:M sparsity: of every `m` consecutive inputs of a weight at most `n` stay. The sparsity that is reached
    is 1 - n / m.
    """

    name = "prune_nm"

    def __init__(self, n: int = 2, m: int = 4, criterion: str = "magnitude", **options: Any) -> None:
        check_options(0.0, "n_m", "global", n, m, (1, 1))
        super().__init__(1 - n / m, "n_m", criterion=criterion, n=n, m=m, **options)
