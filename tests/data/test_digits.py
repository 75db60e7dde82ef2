"""The packaged digits equal the UCI test set, pixel by pixel."""

import hashlib

import numpy as np
import torch
from support.runs import config

from lathe.data import Digits
from lathe.data.digits import DIGITS
from lathe.runs.build import make_data

# Of sklearn.datasets.load_digits(), version 1.9.1: its images and target as uint8.
IMAGES = "8f26b2bd9d135c256808f68f14fdabddde6d9c7f869ae419704b051f0f14b3b3"
LABELS = "8ba4f891220f5e4c9c819638d1602d74b83618f167043c6da52a2a247841ddf0"
# Of Digits().load(): the training images [1300, 1, 8, 8] uint8, unchanged since the first version.
TRAIN = "d30731c6c8a4fce80e36528459958e25b4e8bafc3ae9b560dd1a86693b5c1a00"
TRAIN_12 = "e2903d452d8029d538ef5406a909598a4938fbbc57b46491899ff854364338f0"


def digest(array: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def test_the_stored_arrays_are_the_published_ones() -> None:
    with np.load(DIGITS, allow_pickle=False) as digits:
        assert set(digits.files) == {"images", "labels"}
        images, labels = digits["images"], digits["labels"]
    assert (images.shape, images.dtype, labels.shape, labels.dtype) == ((1797, 8, 8), np.uint8, (1797,), np.uint8)
    assert (digest(images), digest(labels)) == (IMAGES, LABELS)
    # counts of UCI's description
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_a_run_of_before_reads_the_same_samples() -> None:
    assert digest(Digits().load().train.read()[0]) == TRAIN
    assert digest(Digits(image_size=12).load().train.read()[0]) == TRAIN_12


def test_the_configuration_has_their_mean_and_deviation() -> None:
    data = make_data(config())
    whole = torch.cat([x[y != -100] for x, y in data.eval_loader("train")])
    assert abs(whole.mean()) < 0.01
    assert abs(whole.std() - 1) < 0.01
