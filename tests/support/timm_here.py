"""timm, if installed or in the folder $TIMM_SITE."""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

# timm imports torchvision, whose CUDA wheel needs this shim with a CPU build of torch
SHIM = Path(__file__).parent / "torchvision_here"


def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the package, for this process and its children until `monkeypatch` ends; skip the test without it."""
    site = os.environ.get("TIMM_SITE", "")
    if "timm" not in sys.modules and find_spec("timm") is None and not Path(site, "timm").is_dir():
        pytest.skip("timm is not installed, nor does it lie in the folder $TIMM_SITE")
    if site:
        monkeypatch.setattr(sys, "path", [*sys.path, site])
    folders = [os.environ.get("PYTHONPATH", ""), site]
    if torch.version.cuda is None and _for_cuda():
        monkeypatch.setattr(sys, "path", [str(SHIM), *sys.path])
        folders = [str(SHIM), *folders]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    return import_module("timm")


def _for_cuda() -> bool:
    found = [Path(folder, "torchvision", "version.py") for folder in sys.path]
    return any("+cu" in path.read_text() for path in found if path.is_file())
