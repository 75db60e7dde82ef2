"""torchvision's CUDA wheel with a CPU build of torch: declares the operators that can't be loaded, and imports it."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import torch

_library = torch.library.Library("torchvision", "DEF")
_library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

_here = Path(__file__).parents[1]
_real = PathFinder.find_spec("torchvision", [folder for folder in sys.path if Path(folder).resolve() != _here])
assert _real is not None
assert _real.origin is not None
__path__ = list(_real.submodule_search_locations or ())
exec(compile(Path(_real.origin).read_text(), _real.origin, "exec"))
