"""Weights set to zero: which, by what score, when, and how they stay zero."""

from lathe.compression.masks.masks import apply_masks, magnitude_masks, make_masks, sparsity_of
from lathe.compression.masks.parameters import maskable, zero_share

__all__ = ["apply_masks", "magnitude_masks", "make_masks", "maskable", "sparsity_of", "zero_share"]
