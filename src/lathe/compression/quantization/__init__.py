"""Integers for weights and activations: rounding that trains, ranges, and what is done after training."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
