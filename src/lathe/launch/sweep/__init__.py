"""Sweeps: the jobs of `-m`, chosen by grid, list or search, run in processes of their own, and taken up again after any
end. Imports no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
