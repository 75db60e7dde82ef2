"""From a command line to running processes. Imports no torch, so that it answers at once."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
