"""Compression methods: algorithms on tensors and modules, and the callbacks that schedule them.

Only the callbacks import Lightning.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
