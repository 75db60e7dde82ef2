"""From a command line to running processes. Imports no torch, so that it answers at once."""

from lathe.launch.dry_run import launch_dry_run
from lathe.launch.error_reporting import report_errors
from lathe.launch.launcher import launch
from lathe.launch.run_commands import launch_on_run, run_inline

__all__ = ["launch", "launch_dry_run", "launch_on_run", "report_errors", "run_inline"]
