"""Pruning of rows, or of N:M groups of inputs."""

from typing import Any

from lathe.callbacks.methods.pruning import Prune
from lathe.compression.masks.masks import check_options
from lathe.config.types import Count, Criterion, MaskScope, OpenShare, Positive, Share, ShareBelowOne, SparsityCurve
from lathe.config.validation import validated


class PruneStructured(Prune):
    """Prune rows: output channels of convolutions, output features of linear layers."""

    name = "prune_structured"
    fixed_parameters = ("granularity", "n", "m", "block")

    @validated
    def __init__(
        self,
        sparsity: OpenShare = 0.5,
        scope: MaskScope = "layer",
        criterion: Criterion = "magnitude",
        norm: Positive = 2.0,
        schedule: SparsityCurve = "cubic",
        initial_sparsity: ShareBelowOne = 0.0,
        start: Share = 0.1,
        end: Share = 0.6,
        every_n_steps: Count | None = None,
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


class PruneNM(Prune):
    """Prune to N:M sparsity: at most `n` of `m` consecutive inputs are kept; sparsity is 1 - n / m."""

    name = "prune_nm"
    fixed_parameters = ("sparsity", "granularity", "norm", "block")

    @validated
    def __init__(
        self,
        n: Count = 2,
        m: Count = 4,
        criterion: Criterion = "magnitude",
        **options: Any,
    ) -> None:
        check_options(0.0, "n_m", "global", n, m, (1, 1))
        super().__init__(1 - n / m, "n_m", criterion=criterion, n=n, m=m, **options)
