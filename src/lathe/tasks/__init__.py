"""LightningModules: what a batch, a loss and a metric are. A task wraps a net; everything hard is in callbacks and
strategies.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
