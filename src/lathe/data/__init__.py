"""Data: sources of images, batched augmentation, loaders that are exact under any number of devices, and the data
module.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
