"""Compare runs: their differences, means with intervals, paired tests, and a page of plots."""

from lathe.verbs.report.make import report

__all__ = ["report"]
