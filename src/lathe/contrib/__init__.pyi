from .alerts import Alerts as Alerts
from .dp import DP as DP
from .hard_samples import HardSamples as HardSamples
from .horovod import Horovod as Horovod
from .image_sizes import ImageSizes as ImageSizes
from .what_if import WhatIf as WhatIf
from .whitening import Whitening as Whitening
