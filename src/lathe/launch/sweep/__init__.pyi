from .sweep_dir import SweepJob as SweepJob
from .sweep_dir import check_sweep_words as check_sweep_words
from .sweep_dir import job_of as job_of
from .sweeper import Context as Context
from .sweeper import run_sweep as run_sweep
