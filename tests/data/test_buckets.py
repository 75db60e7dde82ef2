"""The packing of samples into batches."""

import numpy as np
from support.documents import lengths

from lathe.data.buckets import plan_buckets, round_up


def test_a_plan_fills_all_batches_but_the_last_of_its_buckets() -> None:
    sizes = np.array(lengths(1000))
    plan = plan_buckets(sizes, 256, 1000, 1.1, 4)
    longest = np.maximum.reduceat(round_up(sizes[plan.order], 4), plan.bounds[:-1])
    rows = np.diff(plan.bounds)
    first_of_bucket = np.flatnonzero(np.diff(plan.bucket, prepend=-1))
    fits = 256 // round_up(sizes[plan.order][first_of_bucket], 4)[plan.bucket[plan.bounds[:-1]]]
    assert (rows[:-1] == fits[:-1]).all()
    assert (rows * longest <= 256).all()
