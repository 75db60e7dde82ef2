from .context import Context as Context
from .place import SweepJob as SweepJob
from .place import check_sweep_words as check_sweep_words
from .place import job_of as job_of
from .running import run_sweep as run_sweep
