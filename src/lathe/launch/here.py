"""From a command line to a verb that looks at run directories and trains nothing itself. Imports no torch."""

import sys
from typing import Any

from omegaconf import DictConfig

from lathe.config.composed import resolve
from lathe.launch.agent import call
from lathe.launch.start import check_typed
from lathe.launch.stops import stoppable
from lathe.launch.telling import tell


def launch_here(cfg: DictConfig, job: str) -> None:
    """Calls `job`, a function named `module:function`, with the resolved `cfg`, and ends this process with the exit
    code that it returns, which is 0 where it returns something else.
    """
    code: Any
    try:
        with stoppable():
            request = resolve(cfg)
            check_typed(cfg, request)
            code = call(job, request)
    except Exception as error:
        code = tell(error)  # here: Hydra would print a line of its own first
    sys.exit(code if isinstance(code, int) else 0)
