"""Sparse weights: masks, criteria, schedules, rewiring, and the sensitivity of single layers."""

from .masks import Pattern as Pattern
from .masks import SparsitySchedule as SparsitySchedule
from .masks import apply_masks as apply_masks
from .masks import copy_state as copy_state
from .masks import erdos_renyi_kernel as erdos_renyi_kernel
from .masks import exchange as exchange
from .masks import input_squares as input_squares
from .masks import magnitude_masks as magnitude_masks
from .masks import make_masks as make_masks
from .masks import maskable as maskable
from .masks import random_masks as random_masks
from .masks import rewind as rewind
from .masks import round_sparsities as round_sparsities
from .masks import sparsity_of as sparsity_of
from .masks import wanda as wanda
from .masks import zero_share as zero_share
from .sensitivity import Option as Option
from .sensitivity import allocate as allocate
from .sensitivity import layers as layers
from .sensitivity import quantized_bytes as quantized_bytes
from .sensitivity import scan as scan
