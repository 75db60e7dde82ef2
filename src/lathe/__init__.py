"""Lathe: a Lightning + Hydra research template.

From Python: `lathe.compose`, `lathe.train`, `lathe.load`, `lathe.restore`, `lathe.runs_frame`; for any module
`lathe.compress` and `lathe.export_module` (docs/python.md); and `lathe.Trainer` (docs/speed.md).
"""

import os

import lazy_loader

# How long the threads of torch's OpenMP (libgomp) spin at a barrier before they sleep. On cores that other programs use
# too, its own 300,000 rounds made training 20 times slower (benchmarks/bench_busy.py). It is read when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
