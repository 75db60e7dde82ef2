"""Distillation losses on outputs, features and relations of samples."""

from .losses import attention as attention
from .losses import crd as crd
from .losses import dist as dist
from .losses import dkd as dkd
from .losses import hint as hint
from .losses import kd as kd
from .losses import rkd as rkd
