"""What tests import and list for seconds in the midst of a run, once for all workers that are forked."""

import logging

import torch._inductor.compile_fx  # noqa: F401 (is imported)
from torch.onnx._internal.exporter import _registration

from support import fixtures  # noqa: F401 (from here on the list is kept)

logging.disable()  # it tells of each package that is not there and has operators
_registration.ONNXRegistry.from_torchlib()
logging.disable(logging.NOTSET)
