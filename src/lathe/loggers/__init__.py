"""Loggers: each function takes the run directory and the first optimizer step, and returns a logger."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
