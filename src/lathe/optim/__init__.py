"""Parameter groups, learning-rate schedules, and optimizers that torch does not have."""

from lathe.optim.build import build_optimizer
from lathe.optim.muon import Muon

__all__ = ["Muon", "build_optimizer"]
