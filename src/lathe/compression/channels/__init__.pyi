from .choice import add_penalty as add_penalty
from .choice import prune_channels as prune_channels
from .groups import find_groups as find_groups
from .slices import Group as Group
from .slices import Slice as Slice
from .slices import describe as describe
from .slices import rebuild as rebuild
from .slices import remove as remove
