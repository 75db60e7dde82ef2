"""Lightning adapters: when something acts during a run."""

from typing import TYPE_CHECKING

from lathe import lazily
from lathe.callbacks.checkpoint import Checkpoint, numbers
from lathe.callbacks.checkpoint_io import AtomicCheckpointIO
from lathe.callbacks.compression import Compression, compressions
from lathe.callbacks.ema import EMA
from lathe.callbacks.lean import skip_empty_hooks
from lathe.callbacks.model_summary import ModelSummary
from lathe.callbacks.nan_guard import NanGuard
from lathe.callbacks.preemption import Preemption
from lathe.callbacks.profiler import TorchProfiler
from lathe.callbacks.progress import Progress
from lathe.callbacks.resume import ExactResume
from lathe.callbacks.throughput import Throughput

if TYPE_CHECKING:
    from lathe.callbacks.channels import PruneChannels
    from lathe.callbacks.distill import Distill
    from lathe.callbacks.lottery import Lottery
    from lathe.callbacks.pruning import Prune, PruneNM, PruneStructured
    from lathe.callbacks.ptq import PTQDynamic, PTQStatic, WeightOnly
    from lathe.callbacks.qat import QAT
    from lathe.callbacks.rigl import RigL
else:
    __getattr__ = lazily(
        __name__,
        {
            "PruneChannels": "channels",
            "Distill": "distill",
            "Lottery": "lottery",
            "Prune": "pruning",
            "PruneNM": "pruning",
            "PruneStructured": "pruning",
            "PTQDynamic": "ptq",
            "PTQStatic": "ptq",
            "WeightOnly": "ptq",
            "QAT": "qat",
            "RigL": "rigl",
        },
    )

__all__ = [
    "EMA",
    "QAT",
    "AtomicCheckpointIO",
    "Checkpoint",
    "Compression",
    "Distill",
    "ExactResume",
    "Lottery",
    "ModelSummary",
    "NanGuard",
    "PTQDynamic",
    "PTQStatic",
    "Preemption",
    "Progress",
    "Prune",
    "PruneChannels",
    "PruneNM",
    "PruneStructured",
    "RigL",
    "Throughput",
    "TorchProfiler",
    "WeightOnly",
    "compressions",
    "numbers",
    "skip_empty_hooks",
]
