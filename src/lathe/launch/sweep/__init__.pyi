from .sweep_job import SweepJob as SweepJob
from .sweep_job import check_sweep_words as check_sweep_words
from .sweep_job import job_of as job_of
from .sweeper import Context as Context
from .sweeper import run_sweep as run_sweep
