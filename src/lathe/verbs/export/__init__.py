"""Export a run to files for other runtimes, each compared with the trained net."""

from lathe.verbs.export.ship import ship

__all__ = ["ship"]
