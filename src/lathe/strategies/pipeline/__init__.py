"""Pipeline parallelism: a net is cut into stages, one per process, which micro-batches pass through."""

from lathe.strategies.pipeline.strategy import Pipeline

__all__ = ["Pipeline"]
