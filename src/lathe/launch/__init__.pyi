from .error_reporting import report_errors as report_errors
from .launcher import launch as launch
from .run_commands import launch_dry_run as launch_dry_run
from .run_commands import launch_on_run as launch_on_run
from .run_commands import run_inline as run_inline
