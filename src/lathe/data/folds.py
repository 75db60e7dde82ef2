"""Cross-validation in k folds, and learning curves over a share of the training samples."""

from collections.abc import Sequence

import numpy as np

from lathe.data.checks import class_name
from lathe.data.splits import Labels, Split, Splits, stratified_order
from lathe.errors import ArgumentError, UserError


def check_folds(folds: int | None, fold: int | None) -> None:
    """Raise ArgumentError if only one is given, or the fold does not exist."""
    if (folds is None) != (fold is None):
        given, lacking = ("folds", "fold") if fold is None else ("fold", "folds")
        value = folds if fold is None else fold
        raise ArgumentError(f"{given}={value} needs data.{lacking}: give both, or neither.")
    if folds is not None and fold is not None and not 0 <= fold < folds:
        raise ArgumentError(f"fold={fold} is none of data.folds={folds}: choose 0 to {folds - 1}.")


def fold_rows(
    labels: Labels, folds: int, fold: int, seed: int, names: Sequence[str] | None = None
) -> tuple[Labels, Labels]:
    """Return the places in `labels` [n] for training and for validation, in ascending order.

    Samples are shuffled within their class and dealt out class by class, so fold sizes differ by at most one, in each
    class and in total. Each sample validates in one fold. `names` are the class names.
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
    """Combine the training and validation images and divide them by fold; the test is unchanged."""
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
    """Return the places of a share of `labels` [n], stratified, ascending; a smaller share is a subset."""
    count = max(1, round(share * len(labels)))
    return np.sort(stratified_order(labels, seed)[:count])


def with_share(splits: Splits, share: float, seed: int) -> Splits:
    """Return the splits with a share of the training images."""
    train = splits.train
    rows = train.rows[share_rows(train.labels[train.rows], share, seed)]
    return Splits(Split(train.images, train.labels, rows, train.names), splits.val, splits.test)
