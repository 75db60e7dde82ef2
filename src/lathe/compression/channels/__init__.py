"""Removal of channels: dependency groups, their selection, and the smaller net."""

from .removal import Group as Group
from .removal import Slice as Slice
from .removal import add_penalty as add_penalty
from .removal import describe as describe
from .removal import find_groups as find_groups
from .removal import prune_channels as prune_channels
from .removal import rebuild as rebuild
from .removal import remove as remove
