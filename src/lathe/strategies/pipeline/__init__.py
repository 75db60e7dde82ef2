"""Pipelines: a net is cut into stages, one per process, through which pieces of a batch follow each other."""

from lathe.strategies.pipeline.strategy import Pipeline

__all__ = ["Pipeline"]
