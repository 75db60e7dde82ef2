from .masks import apply_masks as apply_masks
from .masks import magnitude_masks as magnitude_masks
from .masks import make_masks as make_masks
from .masks import sparsity_of as sparsity_of
from .parameters import maskable as maskable
from .parameters import zero_share as zero_share
