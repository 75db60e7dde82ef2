"""Works and tested, but nothing in the core knows it: DataParallel, Horovod, TorchScript and TorchServe."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
