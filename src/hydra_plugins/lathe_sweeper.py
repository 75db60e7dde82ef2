"""The Hydra plug-in `hydra/sweeper=lathe`, which -m of train.py uses; Hydra requires this package.

Every command imports this file, so other imports wait for a sweep.
"""

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LatheSweeper(Sweeper):
    """Run each job of a sweep in a separate process (lathe.launch.sweep).

    `params` are values by key, added to the overrides as by Hydra's own sweeper: {seed: "1,2,3"}.
    """

    def __init__(self, params: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> Sequence[Any]:
        from lathe.launch.sweep.sweeper import Context, run_sweep

        return run_sweep(Context(*self.context), self.params, arguments)


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="lathe",
    node={"_target_": "hydra_plugins.lathe_sweeper.LatheSweeper", "params": None},
    provider="lathe",
)
