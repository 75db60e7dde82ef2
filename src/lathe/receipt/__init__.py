"""What a net that was made small has become: metrics, bytes, arithmetic and time beside the dense net, measured here
and now.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
