"""Legacy support for torch's DataParallel, Horovod, TorchScript and TorchServe. Nothing else depends on it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
