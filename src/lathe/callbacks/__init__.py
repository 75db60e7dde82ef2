"""Lightning adapters: when something acts during a run."""

from typing import TYPE_CHECKING

from lathe.callbacks.alerts import Alerts
from lathe.callbacks.checkpoint import Checkpoint, numbers
from lathe.callbacks.checkpoint_io import AtomicCheckpointIO
from lathe.callbacks.device_stats import DeviceStats
from lathe.callbacks.ema import EMA
from lathe.callbacks.frozen import FrozenStatistics
from lathe.callbacks.graphs import Graphs
from lathe.callbacks.hard_samples import HardSamples
from lathe.callbacks.image_sizes import ImageSizes
from lathe.callbacks.methods.base import Compression, compressions
from lathe.callbacks.model_summary import ModelSummary
from lathe.callbacks.nan_guard import NanGuard
from lathe.callbacks.noop_hooks import skip_empty_hooks
from lathe.callbacks.preemption import Preemption
from lathe.callbacks.profiler import TorchProfiler
from lathe.callbacks.progress import Progress
from lathe.callbacks.rng_state import ExactResume
from lathe.callbacks.samples import Samples
from lathe.callbacks.skippable_hooks import SkippableHooks
from lathe.callbacks.throughput import Throughput
from lathe.callbacks.trial import TrialReport
from lathe.callbacks.wall_time import WallTime
from lathe.callbacks.what_if import WhatIf
from lathe.callbacks.whitening import Whitening
from lathe.config.faces import lazily

if TYPE_CHECKING:
    from lathe.callbacks.methods.channels import PruneChannels
    from lathe.callbacks.methods.distill import Distill
    from lathe.callbacks.methods.lottery import Lottery
    from lathe.callbacks.methods.pruning import Prune
    from lathe.callbacks.methods.pruning_patterns import PruneNM, PruneStructured
    from lathe.callbacks.methods.ptq import PTQDynamic, PTQStatic, WeightOnly
    from lathe.callbacks.methods.qat import QAT
    from lathe.callbacks.methods.rigl import RigL
else:
    __getattr__ = lazily(
        __name__,
        {
            "PruneChannels": "methods.channels",
            "Distill": "methods.distill",
            "Lottery": "methods.lottery",
            "Prune": "methods.pruning",
            "PruneNM": "methods.pruning_patterns",
            "PruneStructured": "methods.pruning_patterns",
            "PTQDynamic": "methods.ptq",
            "PTQStatic": "methods.ptq",
            "WeightOnly": "methods.ptq",
            "QAT": "methods.qat",
            "RigL": "methods.rigl",
        },
    )

__all__ = [
    "EMA",
    "QAT",
    "Alerts",
    "AtomicCheckpointIO",
    "Checkpoint",
    "Compression",
    "DeviceStats",
    "Distill",
    "ExactResume",
    "FrozenStatistics",
    "Graphs",
    "HardSamples",
    "ImageSizes",
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
    "Samples",
    "SkippableHooks",
    "Throughput",
    "TorchProfiler",
    "TrialReport",
    "WallTime",
    "WeightOnly",
    "WhatIf",
    "Whitening",
    "compressions",
    "numbers",
    "skip_empty_hooks",
]
