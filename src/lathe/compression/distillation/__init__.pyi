from .features import attention as attention
from .features import hint as hint
from .losses import dist as dist
from .losses import dkd as dkd
from .losses import kd as kd
from .relations import crd as crd
from .relations import rkd as rkd
