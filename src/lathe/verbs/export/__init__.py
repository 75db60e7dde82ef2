"""From a run directory to files for other runtimes, each compared with what was trained before it gets its name."""

from lathe.verbs.export.ship import ship

__all__ = ["ship"]
