"""Slow imports and listings of tests, done once before workers are forked."""

import logging

import torch._inductor.compile_fx  # noqa: F401  # imported for the workers
from torch.onnx._internal.exporter import _registration

from support import fixtures  # noqa: F401  # from here on the list is cached

logging.disable()  # it reports each missing package with operators
_registration.ONNXRegistry.from_torchlib()
logging.disable(logging.NOTSET)
