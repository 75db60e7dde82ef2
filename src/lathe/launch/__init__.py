"""From a command line to running processes. Imports no torch: it answers at once."""

from lathe.launch.here import launch_here
from lathe.launch.start import launch, launch_on_run
from lathe.launch.telling import one_sentence
from lathe.launch.trial import launch_trial

__all__ = ["launch", "launch_here", "launch_on_run", "launch_trial", "one_sentence"]
