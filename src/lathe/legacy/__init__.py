"""Kept for those who still run them: torch's DataParallel, Horovod, TorchScript and TorchServe. Nothing else stands on
them.
"""

from typing import TYPE_CHECKING

from lathe.config.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from lathe.legacy.dp import DP
    from lathe.legacy.horovod import Horovod
else:
    __getattr__ = lazy_getattr(__name__, {"DP": "dp", "Horovod": "horovod"})

__all__ = ["DP", "Horovod"]
