"""A Trainer on CPUs without output."""

from typing import Any

from lathe.trainer import Trainer

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


def quiet_trainer(*callbacks: Any, **options: Any) -> Trainer:
    return Trainer(callbacks=list(callbacks), **{**QUIET, **options})
