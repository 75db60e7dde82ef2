"""Losses by which a net learns from another: its outputs, its features, and the relations of its samples."""

from lathe.compression.distillation.features import attention, hint
from lathe.compression.distillation.losses import dist, dkd, kd
from lathe.compression.distillation.relations import crd, rkd

__all__ = ["attention", "crd", "dist", "dkd", "hint", "kd", "rkd"]
