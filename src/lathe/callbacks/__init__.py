"""Lightning adapters: when something acts during a run."""

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

__all__ = [
    "EMA",
    "AtomicCheckpointIO",
    "Checkpoint",
    "Compression",
    "ExactResume",
    "ModelSummary",
    "NanGuard",
    "Preemption",
    "Progress",
    "Throughput",
    "TorchProfiler",
    "compressions",
    "numbers",
    "skip_empty_hooks",
]
