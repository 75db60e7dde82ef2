"""Sparse weights: masks, criteria, schedules, rewiring, and the sensitivity of single layers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
