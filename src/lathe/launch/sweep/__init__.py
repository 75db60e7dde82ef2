"""Sweeps: the jobs of `-m` from a grid, list or search, each in a process, and resumable. Imports no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
