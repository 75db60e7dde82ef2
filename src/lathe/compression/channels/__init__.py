"""Channels removed: what hangs together in a net, which to take, and the smaller net."""

from lathe.compression.channels.groups import find_groups
from lathe.compression.channels.prune import prune_channels
from lathe.compression.channels.slices import Group, Slice, describe, rebuild, remove

__all__ = ["Group", "Slice", "describe", "find_groups", "prune_channels", "rebuild", "remove"]
