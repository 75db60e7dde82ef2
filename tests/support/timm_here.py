"""timm, where it is installed: `import support.timm_here` skips a test module where it is not."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# timm imports torchvision, whose wheel for CUDA can't be imported beside a CPU build of torch: see what lies there
SHIM = Path(__file__).parent / "torchvision_here"

if find_spec("timm") is None:
    pytest.skip("timm is not installed", allow_module_level=True)


def _for_cuda() -> bool:
    spec = find_spec("torchvision")
    assert spec is not None
    assert spec.origin is not None
    return "+cu" in (Path(spec.origin).parent / "version.py").read_text()


if torch.version.cuda is None and str(SHIM) not in sys.path and _for_cuda():
    sys.path.insert(0, str(SHIM))  # of processes that are spawned, too
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SHIM), *filter(None, [os.environ.get("PYTHONPATH")])])

import timm  # noqa: E402

__all__ = ["timm"]
