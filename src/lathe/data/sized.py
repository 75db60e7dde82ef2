"""Checks of datasets and their numbers of samples."""

from collections.abc import Sized
from typing import Any

from lathe.data.forms import form
from lathe.data.iterable import is_iterable
from lathe.data.source import using
from lathe.errors import UserError

MOST = 10**10  # samples, as the order of an epoch lists them


def check_kind(name: str, dataset: Any) -> None:
    """Raise UserError if `data.<name>` is not a dataset with a length."""
    if is_iterable(dataset):
        return
    if not hasattr(dataset, "__getitem__") or isinstance(dataset, (str, dict)):
        raise UserError(f"data.{name}: {form(dataset)} is no dataset: expected one with __len__ and __getitem__.")
    if not isinstance(dataset, Sized):
        raise UserError(
            f"data.{name}: {type(dataset).__name__} has no __len__, so an epoch has no order: let it return the number "
            "of samples."
        )
    count_samples(name, dataset)


def check_batch(size: int, n: int, replicas: int) -> None:
    """Raise UserError if a global training batch does not divide by the replicas, or exceeds `n` samples."""
    if size % replicas:
        raise UserError(
            f"data.batch_size={size} is the global batch and does not divide by the {replicas} replicas that "
            f"trainer.devices={replicas} makes: choose a multiple of {replicas}, or other devices."
        )
    if size > n:
        raise UserError(f"data.batch_size={size} cannot be filled from {n} training samples: choose 1 to {n}.")


def count_samples(name: str, dataset: Sized) -> int:
    """Return the number of samples of `data.<name>`; raise UserError if there are too many."""
    with using(dataset, "counted", f"data.{name}"):
        n = len(dataset)
    if n > MOST:
        raise UserError(
            f"data.{name}: {type(dataset).__name__} has {n} samples by its __len__, expected at most {MOST}."
        )
    return n
