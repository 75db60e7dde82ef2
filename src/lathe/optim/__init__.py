"""Parameter groups, learning-rate schedules, and optimizers that torch does not have."""

from lathe.optim.build import build_optimizer
from lathe.optim.large_batch import LAMB, LARS
from lathe.optim.muon import Muon
from lathe.optim.schedules import constant, cosine, cosine_restarts, linear, one_cycle, step

__all__ = [
    "LAMB",
    "LARS",
    "Muon",
    "build_optimizer",
    "constant",
    "cosine",
    "cosine_restarts",
    "linear",
    "one_cycle",
    "step",
]
