"""Cross-validation, the samples that are not the test's in k parts, of which one validates and the others train; and
learning curves, a share of those that train.
"""

from collections.abc import Sequence

import numpy as np

from lathe.data.checks import class_name
from lathe.data.splits import Labels, Split, Splits, stratified_order
from lathe.errors import ArgumentError, UserError


def check_folds(folds: int | None, fold: int | None) -> None:
    """Raises ArgumentError if one is given without the other, or there is no such fold."""
    if (folds is None) != (fold is None):
        given, lacking = ("folds", "fold") if fold is None else ("fold", "folds")
        value = folds if fold is None else fold
        raise ArgumentError(f"{given}={value} needs data.{lacking}: give both, or neither.")
    if folds is not None and fold is not None and not 0 <= fold < folds:
        raise ArgumentError(f"fold={fold} is none of data.folds={folds}: choose 0 to {folds - 1}.")


def fold_rows(
    labels: Labels, folds: int, fold: int, seed: int, names: Sequence[str] | None = None
) -> tuple[Labels, Labels]:
    """The places in `labels` [n] that train, and those that validate, both in rising order.

    Samples are shuffled within their class, and dealt out class by class: of each class, and of all samples, each fold
    has as many as any other, or one less. Each sample validates in one fold. `names` are what the classes are called.

    Raises:
        UserError: a class has fewer samples than there are folds.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    shuffled = rng.permutation(len(labels))
    classes, counts = np.unique(labels, return_counts=True)
    if not len(labels) or counts.min() < folds:
        rarest = int(classes[counts.argmin()]) if len(labels) else 0
        few = f"{class_name(rarest, names)} has" if len(classes) > 1 else "there are"
        least = int(counts.min()) if len(labels) else 0
        raise UserError(
            f"data.folds={folds}: {few} {least} samples outside the test, of which each fold needs one: choose at most "
            "as many folds."
        )
    dealt = shuffled[np.argsort(labels[shuffled], kind="stable")]
    chosen = np.zeros(len(labels), bool)
    chosen[dealt[fold::folds]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def refold(splits: Splits, folds: int, fold: int, seed: int, names: Sequence[str] | None = None) -> Splits:
    """Training and validation images put together and divided anew; the test stays.

    Raises:
        UserError: the images are no arrays, or as `fold_rows`.
    """
    train, val = splits.train, splits.val
    if not isinstance(train.images, np.ndarray) or not isinstance(val.images, np.ndarray):
        raise UserError(
            f"data.folds={folds} cannot divide images that are streamed from shards: use a source whose images are an "
            "array, or shards of each fold."
        )
    if train.images is val.images and np.array_equal(train.labels, val.labels):
        images, labels, rows = train.images, train.labels, np.sort(np.concatenate([train.rows, val.rows]))
        names = train.names
    else:
        parts = train.read(), val.read()
        images, labels = (np.concatenate([part[i] for part in parts]) for i in range(2))
        rows, names = np.arange(len(labels)), None
    kept, held_out = fold_rows(labels[rows], folds, fold, seed, names)
    trained, held = (Split(images, labels, rows[some], names) for some in (kept, held_out))
    return Splits(trained, held, splits.test)


def share_rows(labels: Labels, share: float, seed: int) -> Labels:
    """The places in `labels` [n] of a share of the samples, in rising order: each class has nearly this share of its
    own, and a smaller share is part of a larger.
    """
    count = max(1, round(share * len(labels)))
    return np.sort(stratified_order(labels, seed)[:count])


def with_share(splits: Splits, share: float, seed: int) -> Splits:
    """The same splits with a share of the training images."""
    train = splits.train
    rows = train.rows[share_rows(train.labels[train.rows], share, seed)]
    return Splits(Split(train.images, train.labels, rows, train.names), splits.val, splits.test)
