"""Sweeps: the jobs of `-m`, chosen by grid, list or search, run in processes of their own, and taken up again after any
end. Imports no torch.
"""

from lathe.launch.sweep.context import Context
from lathe.launch.sweep.place import SweepJob, check_sweep_words, job_of
from lathe.launch.sweep.running import run_sweep

__all__ = ["Context", "SweepJob", "check_sweep_words", "job_of", "run_sweep"]
