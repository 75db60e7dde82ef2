"""Distinguish the user's callbacks from Lathe's and Lightning's, by module: a callback from anywhere is a user's."""

from lightning.pytorch.callbacks import Callback


def is_users(callback: Callback, *packages: str) -> bool:
    """Return whether the callback's class is in none of `packages`, by default Lathe and Lightning."""
    return type(callback).__module__.partition(".")[0] not in (packages or ("lathe", "lightning"))


def is_based_on_lathe(callback: Callback) -> bool:
    """Return whether the callback's class is Lathe's or derives from one of Lathe's."""
    return any(kind.__module__.partition(".")[0] == "lathe" for kind in type(callback).__mro__)
