"""Runs side by side: what differs between them, means with intervals, what the differences are worth, and a page that
draws it.
"""

from lathe.verbs.report.make import report

__all__ = ["report"]
