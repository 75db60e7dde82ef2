"""Profile a few steps of a run."""

from lathe.verbs.profile.command import profile

__all__ = ["profile"]
