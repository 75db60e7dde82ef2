"""Losses by which a net learns from another: its outputs, its features, and the relations of its samples."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
