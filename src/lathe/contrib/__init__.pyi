from .dp import DP as DP
from .horovod import Horovod as Horovod
