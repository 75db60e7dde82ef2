"""Parts that work and are tested, but that nothing in the core knows: strategies, targets and niche callbacks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
